"""Checks an installation: versions, devices, kernels, one tree against its rows, the plugin in a new process."""

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
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


def diagnose(*, start_ray: bool) -> Iterator[Finding]:
    """Check the installation; a finding with `Status.FAILED` means that training with trees would not work.

    With `start_ray`, also checks the plugin in a worker of a temporary local Ray cluster.
    """
    yield _find_python()
    for package in NEEDED + OPTIONAL:
        yield _find_version(package)
    yield _find_devices()
    for impl in IMPLEMENTATIONS:
        yield _find_kernel(impl)
    yield _find_hopper_kernel()
    yield _find_fused_layers()
    yield _find_tree_error()
    yield _find_plugin("plugin in a fresh process", examine_here)
    if start_ray:
        yield _find_plugin("plugin in a Ray worker", _examine_in_ray)


def _find_python() -> Finding:
    version = platform.python_version()
    if path_that_ray_splits(sys.executable):
        remedy = "create the environment in a folder without spaces and quotes: Ray cannot start its workers from here"
        return Finding(subject="python", status=Status.FAILED, detail=f"{version} at {sys.executable}; {remedy}")
    return Finding(subject="python", status=Status.OK, detail=version)


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
    found = ", ".join(cuda) if cuda else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
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


def _find_hopper_kernel() -> Finding:
    """The implementation that `attention: auto` chooses on a Hopper GPU in bf16, whatever this machine has."""
    reason = package_reason()
    detail = f"triton, since {reason}" if reason else f"fa4 ({PACKAGE} {version(PACKAGE)})"
    return Finding(subject="tree attention on Hopper", status=Status.OK, detail=detail)


def _find_fused_layers() -> Finding:
    reason = liger_unavailable_reason(torch.device(get_device_name()))
    status = Status.ABSENT if reason else Status.OK
    return Finding(subject="fused layers (use_liger)", status=status, detail=reason or "available")


def _find_tree_error() -> Finding:
    subject = "a tree against its rows"
    try:
        log_prob_error, gradient_error = measure_tree_error()
    except TreeError as error:
        return Finding(subject=subject, status=Status.FAILED, detail=str(error))
    detail = f"log-probs agree to {log_prob_error:.0e}, gradients to {gradient_error:.0e} (tiny Qwen3, float32, CPU)"
    return Finding(subject=subject, status=Status.OK, detail=detail)


def _examine_in_ray() -> Environment:
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        return read_environment(ray.get(ray.remote(probe_task()).remote(), timeout=PROBE_SECONDS))
    finally:
        ray.shutdown()


def _find_plugin(subject: str, examine: Callable[[], Environment]) -> Finding:
    try:
        environment = examine()
    except (ray.exceptions.RayError, subprocess.SubprocessError, OSError, RuntimeError) as error:
        return Finding(subject=subject, status=Status.FAILED, detail=last_line(str(error)))
    if environment.missing:
        detail = f"verl does not know {', '.join(environment.missing)}: {environment.cause}"
        return Finding(subject=subject, status=Status.FAILED, detail=detail)
    return Finding(subject=subject, status=Status.OK, detail=f"verl knows {', '.join(REGISTERED)}")
