"""One update under torch's profiler: does the device idle, do layers wait for it, what runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tree_rl.benchmark.against_packed.kernel_classes import time_by_class

LAYER = "tree_rl.layer"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that wait for the device; reading a value from it ends in one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateProfile:
    """What one update did."""

    waits_in_layers: int
    """Host calls inside a decoder layer, forward or recomputed, that wait for the device."""
    text: str
    """For a terminal: these and other waits, how long the device ran and idled, its time by class of kernels, and its
    longest kernels."""


def profile_update(model: Any, run: Callable[[], object], *, kernels: int = 12) -> UpdateProfile:
    """Profile `run`, one update of the model; the text lists the longest kernels."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with _marked_layers(model), profile(activities=activities) as profiler:
        run()
    events = list(profiler.events() or ())
    layers = [span_of(event) for event in events if event.name == LAYER and not is_on_device(event)]
    waits = [span_of(event)[0] for event in events if event.name in WAITS]
    inside = sum(any(start <= at <= end for start, end in layers) for at in waits)
    spans = [span_of(event) for event in events if is_on_device(event) and event.name != LAYER]
    length = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    idle = 1 - covered_seconds(spans) / length if length else 0.0
    head = f"waits inside layers {inside}, elsewhere {len(waits) - inside}; device {length:.3f} s, idle {idle:.1%}"
    ran = [kernel for kernel in profiler.key_averages() if is_on_device(kernel) and kernel.key != LAYER]
    ran.sort(key=lambda kernel: -kernel.self_device_time_total)
    lines = [f"  {one.self_device_time_total / 1e3:9.1f} ms {one.count:6d} x  {one.key[:90]}" for one in ran[:kernels]]
    classes = time_by_class((one.key, one.self_device_time_total / 1e6, one.count) for one in ran)
    return UpdateProfile(waits_in_layers=inside, text="\n".join([head, *classes, "longest kernels", *lines]))


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
