"""What one GPU did in one step: computing, idling, and communication that nothing hides."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from many_gpus.ranks import synchronized
from tree_rl.benchmark.against_packed.profiled_update import covered_seconds, is_on_device, span_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Seconds of one step on this rank's GPU; all 0 without a GPU."""

    length: float
    """Seconds from the first kernel to the end of the last."""
    idle: float
    """Nothing ran."""
    nccl: float
    """Collectives ran."""
    exposed: float
    """Collectives ran and nothing else did."""

    @classmethod
    def of(cls, events: Iterable[Any]) -> "DeviceTime":
        """Add up what the profiler saw."""
        everything: list[tuple[float, float]] = []
        computing: list[tuple[float, float]] = []
        nccl: list[tuple[float, float]] = []
        for event in events:
            # Ranges that were named on the host are no kernels.
            if is_on_device(event) and not event.is_user_annotation:
                everything.append(span_of(event))
                (nccl if "nccl" in event.name.lower() else computing).append(everything[-1])
        busy = covered_seconds(everything)
        length = max((end for _, end in everything), default=0.0) - min(everything, default=(0.0, 0.0))[0]
        return cls(
            length=length, idle=length - busy, nccl=covered_seconds(nccl), exposed=busy - covered_seconds(computing)
        )


def profiled(step: Callable[[], object], *, host: bool = False) -> Any:
    """torch's profile of one step of this rank on its device, and on the `host` as well."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] * on_gpu + [ProfilerActivity.CPU] * (host or not on_gpu)
    with profile(activities=activities) as profiler:
        step()
        synchronized()
    return profiler


def device_time(step: Callable[[], object]) -> DeviceTime:
    """Where the seconds of one step go on this rank's GPU; without one the step runs and nothing is known."""
    if not torch.cuda.is_available():
        step()
        return DeviceTime.of(())
    return DeviceTime.of(profiled(step).events() or ())
