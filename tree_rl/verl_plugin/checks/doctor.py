"""Findings about an installation: versions, the plugin in fresh processes, devices, kernels, one tree against its rows.

verl hides a plugin that fails to load; this is where the failure shows.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

import ray
import torch

from tree_kernels import chosen_implementation, unavailable_reason
from tree_kernels.tree_attention.api import IMPLEMENTATIONS
from tree_rl.verl_plugin.checks.tiny_tree import TreeError, measure_tree_error
from tree_rl.verl_plugin.compat import SUPPORTED_VERL, get_device_name, import_statement

NEEDED = ("tree_rl", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue")
OPTIONAL = ("vllm", "triton", "peft")
ENGINES = ("tree_language_model", "tree_value_model")
TRAINER = "tree_sync"
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
PROBE_SECONDS = 240
HEAD_SIZE = 128

# Runs where nothing of tree_rl has been imported, so that only verl's own plugin discovery can have loaded it.
PROBE = f"""
import json
{import_statement("TRAINER_REGISTRY")}
{import_statement("EngineRegistry")}
print(json.dumps([sorted(EngineRegistry._engines), sorted(TRAINER_REGISTRY)]))
"""
LOAD_PLUGIN = """
from importlib.metadata import entry_points
found = [entry for entry in entry_points(group="verl.plugins") if entry.name == "tree_rl"]
assert found, "no entry point verl.plugins:tree_rl; install the package (pip install tree_rl), PYTHONPATH is not enough"
found[0].load()
"""


class Status(StrEnum):
    """Outcome of one check."""

    OK = "ok"
    ABSENT = "absent"
    """Optional and not there."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    subject: str
    """What was checked."""
    status: Status
    """Its outcome."""
    detail: str
    """What was found, and the remedy where it failed."""


def diagnose(*, start_ray: bool) -> Iterator[Finding]:
    """Check the installation, one finding at a time.

    Args:
        start_ray: also look at the plugin inside a worker of a local Ray cluster, started and stopped here.

    Yields:
        Findings in order; any with `Status.FAILED` means that training with trees would not work.
    """
    yield Finding(subject="python", status=Status.OK, detail=platform.python_version())
    for package in NEEDED + OPTIONAL:
        yield _find_version(package)
    yield _find_devices()
    for impl in IMPLEMENTATIONS:
        yield _find_kernel(impl)
    yield _find_tree_error()
    yield _find_plugin_in_process()
    if start_ray:
        yield _find_plugin_in_ray()


def _find_version(package: str) -> Finding:
    try:
        found = version(package)
    except PackageNotFoundError:
        status = Status.ABSENT if package in OPTIONAL else Status.FAILED
        return Finding(subject=package, status=status, detail="not installed")
    if package == "verl" and not SUPPORTED_VERL.contains(found, prereleases=True):
        return Finding(subject=package, status=Status.FAILED, detail=f"{found}; tree_rl supports {SUPPORTED_VERL}")
    return Finding(subject=package, status=Status.OK, detail=found)


def _find_devices() -> Finding:
    chosen = get_device_name()
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = ", ".join(cuda) if cuda else f"CPU, {torch.get_num_threads()} threads"
    if chosen == "cuda" and not cuda:
        detail = "verl runs on cuda, but no GPU is visible; on a machine without one set VERL_PLATFORM=cpu"
        return Finding(subject="device", status=Status.FAILED, detail=detail)
    return Finding(subject="device", status=Status.OK, detail=f"{found}; verl runs on {chosen}")


def _find_kernel(impl: str) -> Finding:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reason = unavailable_reason(impl, device=device, dtype=dtype, head_size=HEAD_SIZE)
    chosen = chosen_implementation(device=device, dtype=dtype, head_size=HEAD_SIZE)
    detail = reason or ("chosen by auto" if impl == chosen else "available")
    return Finding(
        subject=f"tree attention, {impl}", status=Status.ABSENT if reason else Status.OK, detail=detail.splitlines()[0]
    )


def _find_tree_error() -> Finding:
    subject = "a tree against its rows"
    try:
        log_prob_error, gradient_error = measure_tree_error()
    except TreeError as error:
        return Finding(subject=subject, status=Status.FAILED, detail=str(error))
    detail = f"log-probs agree to {log_prob_error:.0e}, gradients to {gradient_error:.0e} (tiny Qwen3, float32, CPU)"
    return Finding(subject=subject, status=Status.OK, detail=detail)


def _find_plugin_in_process() -> Finding:
    subject = "plugin in a fresh process"
    finished = subprocess.run(_python(PROBE), capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    if finished.returncode:
        # Without the plugin a configured CPU platform is unknown too: the policy is the cause, not the last line.
        policy = f"{POLICY}={os.environ[POLICY]}: " if POLICY in os.environ else ""
        return Finding(subject=subject, status=Status.FAILED, detail=policy + _last_line(finished.stderr))
    return _judge_probe(subject, finished.stdout)


def _find_plugin_in_ray() -> Finding:
    subject = "plugin in a Ray worker"
    # A function of the standard library: unpickling one of ours would import the plugin, and prove nothing.
    run_in_worker = ray.remote(subprocess.check_output)
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        printed = ray.get(run_in_worker.remote(_python(PROBE), text=True), timeout=PROBE_SECONDS)
    except (ray.exceptions.RayError, OSError, RuntimeError) as error:
        return Finding(subject=subject, status=Status.FAILED, detail=_last_line(str(error)))
    finally:
        ray.shutdown()
    return _judge_probe(subject, printed)


def _judge_probe(subject: str, printed: str) -> Finding:
    engines, trainers = json.loads(printed.splitlines()[-1])
    missing = sorted({*ENGINES, TRAINER} - {*engines, *trainers})
    if not missing:
        registered = ", ".join((*ENGINES, TRAINER))
        return Finding(subject=subject, status=Status.OK, detail=f"verl knows {registered}")
    loaded = subprocess.run(_python(LOAD_PLUGIN), capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    cause = _last_line(loaded.stderr) if loaded.returncode else f"VERL_USE_EXTERNAL_PLUGINS={os.environ.get(POLICY)}"
    return Finding(subject=subject, status=Status.FAILED, detail=f"verl does not know {', '.join(missing)}: {cause}")


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
