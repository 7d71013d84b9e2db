"""What one GPU did in one step: computing, idling, and communication that nothing hides."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from tree_rl.benchmark.against_packed.profiled_update import covered_seconds, is_on_device, span_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Seconds of one step on this rank's GPU; all 0 without a GPU."""

    length: float
    """From the first kernel to the end of the last."""
    idle: float
    """Nothing ran."""
    nccl: float
    """Collectives ran."""
    exposed: float
    """Collectives ran and nothing else did."""


def device_time(step: Callable[[], object]) -> DeviceTime:
    """Profile one step of this rank."""
    if not torch.cuda.is_available():
        step()
        return DeviceTime(length=0.0, idle=0.0, nccl=0.0, exposed=0.0)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    everything: list[tuple[float, float]] = []
    computing: list[tuple[float, float]] = []
    nccl: list[tuple[float, float]] = []
    for event in profiler.events() or ():
        # Ranges that were named on the host are no kernels.
        if is_on_device(event) and not event.is_user_annotation:
            everything.append(span_of(event))
            (nccl if "nccl" in event.name.lower() else computing).append(everything[-1])
    busy = covered_seconds(everything)
    length = max((end for _, end in everything), default=0.0) - min(everything, default=(0.0, 0.0))[0]
    return DeviceTime(
        length=length, idle=length - busy, nccl=covered_seconds(nccl), exposed=busy - covered_seconds(computing)
    )
