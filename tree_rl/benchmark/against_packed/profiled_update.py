"""One update under torch's profiler: does the device idle, do layers wait for it, what runs."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

LAYER = "tree_rl.layer"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that wait for the device; reading a value from it ends in one of them."""
CLASSES: tuple[tuple[str, str], ...] = (
    ("optimizer", r"multi_tensor_apply|adam"),
    (
        "linear attention",
        r"(gate|exit|inverse|joint|score|input|sum)_gradients_kernel|(key|query)_gradients_kernel|side_states_kernel"
        r"|^walk_|^(output|prepare|products)_kernel|delta_rule|causal_conv1d",
    ),
    ("attention", r"flash|fmha|attention|sdpa|^(forward|(key|query)_gradient|row_term|sum_pieces)_kernel"),
    ("head", r"^(gradient|statistics)_kernel|softmax|cross_entropy"),
    ("experts", r"_moe_|_fused_(up|down)_proj|grouped|token_gather"),
    ("norm, rotary embedding, MLP (Liger)", r"rms_norm|rope|swiglu|geglu"),
    ("matrix product", r"gemm|nvjet|cutlass|xmma|matmul|cublas|splitk"),
    ("copy or cast", r"copy_kernel|memcpy|CatArray"),
    ("add", r"CUDAFunctor(OnSelf)?_add|AddFunctor"),
    ("fill", r"FillFunctor|memset"),
    ("index, gather, scatter, sort", r"index|gather|scatter|embedding|sort|scan"),
    ("reduction", r"reduce_kernel"),
    ("other elementwise", r"elementwise"),
)
"""Class and what the names of its kernels hold; the first that fits counts."""
OTHER = "other"


KERNELS_SHOWN = 12


def profile_update(model: Any, run: Callable[[], object]) -> tuple[int, str]:
    """Profile `run`, one update of the model.

    Returns:
        The host's calls inside a decoder layer, forward or recomputed, that wait for the device; and a text of these
        and other waits, how long the device ran and idled, its time by class of kernels, and its longest kernels.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with _marked_layers(model), profile(activities=activities) as profiler:
        run()
    events = list(profiler.events() or ())
    layers = [_span_of(event) for event in events if event.name == LAYER and not _is_on_device(event)]
    waits = [_span_of(event)[0] for event in events if event.name in WAITS]
    inside = sum(any(start <= at <= end for start, end in layers) for at in waits)
    spans = [_span_of(event) for event in events if _is_on_device(event) and event.name != LAYER]
    length = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    idle = 1 - _covered_seconds(spans) / length if length else 0.0
    head = f"waits inside layers {inside}, elsewhere {len(waits) - inside}; device {length:.3f} s, idle {idle:.1%}"
    ran = [kernel for kernel in profiler.key_averages() if _is_on_device(kernel) and kernel.key != LAYER]
    ran.sort(key=lambda kernel: -kernel.self_device_time_total)
    lines = [
        f"  {one.self_device_time_total / 1e3:9.1f} ms {one.count:6d} x  {one.key[:90]}" for one in ran[:KERNELS_SHOWN]
    ]
    classes = time_by_class((one.key, one.self_device_time_total / 1e6, one.count) for one in ran)
    return inside, "\n".join([head, *classes, "longest kernels", *lines])


def class_of(kernel: str) -> str:
    """The class of a kernel's name."""
    return next((name for name, held in CLASSES if re.search(held, kernel, re.IGNORECASE)), OTHER)


def time_by_class(kernels: Iterable[tuple[str, float, int]]) -> list[str]:
    """Lines of a table, the longest class first, from name, seconds on the device and launches of each kernel."""
    seconds: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for kernel, spent, count in kernels:
        seconds[class_of(kernel)] += spent
        launches[class_of(kernel)] += count
    total = sum(seconds.values()) or 1.0
    return [
        f"  {seconds[name] * 1e3:9.1f} ms {seconds[name] / total:6.1%} {launches[name]:6d} x  {name}"
        for name in sorted(seconds, key=lambda name: -seconds[name])
    ]


def _is_on_device(event: Any) -> bool:
    """Whether a profiled event ran on the GPU."""
    return event.device_type == torch.autograd.DeviceType.CUDA


def _span_of(event: Any) -> tuple[float, float]:
    """Start and end of a profiled event in seconds."""
    return event.time_range.start / 1e6, event.time_range.end / 1e6


def _covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
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
