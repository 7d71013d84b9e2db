"""Checks an installation: versions, devices, kernels, one tree against its rows, the plugin in a new process."""

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import ray
import torch

from tree_kernels import chosen_implementation, unavailable_reason
from tree_kernels.tree_attention.api import IMPLEMENTATIONS
from tree_kernels.tree_attention.fa4.autograd import PACKAGE, package_reason
from tree_rl.models.fused_layers import liger_unavailable_reason
from tree_rl.tree.report.counted import counted
from tree_rl.verl_plugin.checks.fresh_process import (
    PROBE_SECONDS,
    REGISTERED,
    Environment,
    examine_here,
    last_line,
    probe_task,
    read_environment,
)
from tree_rl.verl_plugin.checks.tiny_tree import TreeError, measure_tree_error
from tree_rl.verl_plugin.compat import SUPPORTED_VERL, get_device_name
from tree_rl.verl_plugin.launch.train import path_that_ray_splits

NEEDED = ("tree_rl", "verl", "torch", "transformers", "tensordict", "ray", "TransferQueue")
OPTIONAL = ("vllm", "triton", "peft")
HEAD_SIZE = 128


class Status(StrEnum):
    """Outcome of one check."""

    OK = "ok"
    ABSENT = "absent"
    """Outcome of an optional part that is not installed."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One result of a check."""

    subject: str
    """Name of the checked part."""
    status: Status
    detail: str
    """Result of the check, and the remedy if it failed."""


Outcome = tuple[Status, str]
"""Status and detail of a finding."""


def diagnose(*, start_ray: bool) -> Iterator[Finding]:
    """Check the installation; a finding with `Status.FAILED` means that training with trees would not work.

    With `start_ray`, also checks the plugin in a worker of a temporary local Ray cluster.
    """
    checks: dict[str, Callable[[], Outcome]] = {
        "python": _python,
        **{package: partial(_version, package) for package in NEEDED + OPTIONAL},
        "device": _devices,
        **{f"tree attention, {impl}": partial(_kernel, impl) for impl in IMPLEMENTATIONS},
        "tree attention on Hopper": _hopper_kernel,
        "fused layers (use_liger)": _fused_layers,
        "a tree against its rows": _tree_error,
        "plugin in a fresh process": partial(_plugin, examine_here),
    }
    if start_ray:
        checks["plugin in a Ray worker"] = partial(_plugin, _examine_in_ray)
    for subject, check in checks.items():
        status, detail = check()
        yield Finding(subject=subject, status=status, detail=detail)


def _python() -> Outcome:
    found = platform.python_version()
    if path_that_ray_splits(sys.executable):
        remedy = "create the environment in a folder without spaces and quotes: Ray cannot start its workers from here"
        return Status.FAILED, f"{found} at {sys.executable}; {remedy}"
    return Status.OK, found


def _version(package: str) -> Outcome:
    try:
        found = version(package)
    except PackageNotFoundError:
        return Status.ABSENT if package in OPTIONAL else Status.FAILED, "not installed"
    if package == "verl" and not SUPPORTED_VERL.contains(found, prereleases=True):
        return Status.FAILED, f"{found}; tree_rl supports {SUPPORTED_VERL}"
    return Status.OK, found


def _devices() -> Outcome:
    chosen = get_device_name()
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = ", ".join(cuda) if cuda else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    if chosen == "cuda" and not cuda:
        return Status.FAILED, "verl runs on cuda, but no GPU is visible; on a machine without one set VERL_PLATFORM=cpu"
    return Status.OK, f"{found}; verl runs on {chosen}"


def _kernel(impl: str) -> Outcome:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reason = unavailable_reason(impl, device=device, dtype=dtype, head_size=HEAD_SIZE)
    chosen = chosen_implementation(device=device, dtype=dtype, head_size=HEAD_SIZE)
    detail = reason or ("chosen by auto" if impl == chosen else "available")
    return Status.ABSENT if reason else Status.OK, detail.splitlines()[0]


def _hopper_kernel() -> Outcome:
    """The implementation that `attention: auto` chooses on a Hopper GPU in bf16, whatever this machine has."""
    reason = package_reason()
    return Status.OK, f"triton, since {reason}" if reason else f"fa4 ({PACKAGE} {version(PACKAGE)})"


def _fused_layers() -> Outcome:
    reason = liger_unavailable_reason(torch.device(get_device_name()))
    return Status.ABSENT if reason else Status.OK, reason or "available"


def _tree_error() -> Outcome:
    try:
        log_prob_error, gradient_error = measure_tree_error()
    except TreeError as error:
        return Status.FAILED, str(error)
    errors = f"log-probs agree to {log_prob_error:.0e}, gradients to {gradient_error:.0e}"
    return Status.OK, f"{errors} (tiny Qwen3, float32, CPU)"


def _examine_in_ray() -> Environment:
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return read_environment(ray.get(ray.remote(probe_task()).remote(), timeout=PROBE_SECONDS))
    finally:
        ray.shutdown()


def _plugin(examine: Callable[[], Environment]) -> Outcome:
    try:
        environment = examine()
    except (ray.exceptions.RayError, subprocess.SubprocessError, OSError, RuntimeError) as error:
        return Status.FAILED, last_line(str(error))
    if environment.missing:
        return Status.FAILED, f"verl does not know {', '.join(environment.missing)}: {environment.cause}"
    return Status.OK, f"verl knows {', '.join(REGISTERED)}"
