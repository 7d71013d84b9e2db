"""One update under torch's profiler: does the device idle, do layers wait for it, what runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

LAYER = "tree_rl.layer"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that wait for the device; reading a value from it ends in one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateProfile:
    """What one update did."""

    waits_in_layers: int
    """Host calls inside a decoder layer, forward or recomputed, that wait for the device."""
    waits: int
    """All such calls."""
    device_seconds: float
    """From the first to the last operation on the device; 0 on the CPU."""
    idle_share: float
    """Share of that time in which nothing ran."""
    kernels: tuple[tuple[str, float, int], ...]
    """(name, seconds, calls), most time first."""

    def text(self, at_most: int = 12) -> str:
        """A few lines for a terminal."""
        lines = [
            f"waits inside layers {self.waits_in_layers}, elsewhere {self.waits - self.waits_in_layers}; "
            f"device {self.device_seconds:.3f} s, idle {self.idle_share:.1%}"
        ]
        lines += [f"  {seconds * 1e3:9.1f} ms {calls:6d} x  {name[:90]}" for name, seconds, calls in self.kernels]
        return "\n".join(lines[: at_most + 1])


def profile_update(model: Any, run: Callable[[], object]) -> UpdateProfile:
    """Profile one call.

    Args:
        model: its decoder layers are marked meanwhile.
        run: one update of the model.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with _marked_layers(model), profile(activities=activities) as profiler:
        run()
    events = list(profiler.events() or ())
    layers = [span_of(event) for event in events if event.name == LAYER and not is_on_device(event)]
    waits = [span_of(event)[0] for event in events if event.name in WAITS]
    spans = [span_of(event) for event in events if is_on_device(event) and event.name != LAYER]
    kernels = [kernel for kernel in profiler.key_averages() if is_on_device(kernel) and kernel.key != LAYER]
    kernels.sort(key=lambda kernel: -kernel.self_device_time_total)
    length = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    return UpdateProfile(
        waits_in_layers=sum(any(start <= at <= end for start, end in layers) for at in waits),
        waits=len(waits),
        device_seconds=length,
        idle_share=1 - covered_seconds(spans) / length if length else 0.0,
        kernels=tuple((kernel.key, kernel.self_device_time_total / 1e6, kernel.count) for kernel in kernels),
    )


def is_on_device(event: Any) -> bool:
    """Whether a profiled event ran on the GPU."""
    return event.device_type == torch.autograd.DeviceType.CUDA


def span_of(event: Any) -> tuple[float, float]:
    """Start and end of a profiled event in seconds."""
    return event.time_range.start / 1e6, event.time_range.end / 1e6


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one span covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _marked_layers(model: Any) -> Iterator[None]:
    """Each call of a decoder layer as a span of its own in the profile."""
    spans: list[Any] = []

    def enter(*_: object) -> None:
        spans.append(record_function(LAYER))
        spans[-1].__enter__()

    def leave(*_: object) -> None:
        spans.pop().__exit__(None, None, None)

    handles = []
    for layer in model.model.layers:
        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
