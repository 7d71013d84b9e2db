"""One update under torch's profiler: is the device ever idle, does anything inside a layer wait for it, what runs."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

LAYER = "tree_rl.layer"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that wait for the device; reading a value from it ends in one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
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


def trace(model: Any, run: Callable[[], object]) -> Trace:
    """Profile one call.

    Args:
        model: its decoder layers are marked meanwhile.
        run: one update of the model.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with _marked_layers(model), profile(activities=activities) as profiler:
        run()
    events = list(profiler.events() or ())
    layers = [_span(event) for event in events if event.name == LAYER and not _on_device(event)]
    waits = [_span(event)[0] for event in events if event.name in WAITS]
    kernels = [event for event in events if _on_device(event) and not event.name.startswith("tree_rl.")]
    seconds: defaultdict[str, float] = defaultdict(float)
    calls = Counter[str]()
    for event in kernels:
        start, end = _span(event)
        seconds[event.name] += end - start
        calls[event.name] += 1
    length, idle = _idle(sorted(_span(event) for event in kernels))
    return Trace(
        waits_in_layers=sum(any(start <= at <= end for start, end in layers) for at in waits),
        waits=len(waits),
        device_seconds=length,
        idle_share=idle / length if length else 0.0,
        kernels=tuple((name, seconds[name], calls[name]) for name in sorted(seconds, key=lambda name: -seconds[name])),
    )


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


def _on_device(event: FunctionEvent) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA


def _span(event: FunctionEvent) -> tuple[float, float]:
    """Start and end in seconds."""
    return event.time_range.start / 1e6, event.time_range.end / 1e6


def _idle(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Seconds from first start to last end, and those of them that no span covers; spans sorted by start."""
    if not spans:
        return 0.0, 0.0
    idle, reached = 0.0, spans[0][0]
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return reached - spans[0][0], idle
