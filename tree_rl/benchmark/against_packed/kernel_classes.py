"""What kernels of an update do, by their names: where the time goes that no matrix product takes."""

import re
from collections import defaultdict
from collections.abc import Iterable

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


def class_of(kernel: str) -> str:
    """The class of a kernel's name."""
    return next((name for name, held in CLASSES if re.search(held, kernel, re.IGNORECASE)), OTHER)


def time_by_class(kernels: Iterable[tuple[str, float, int]]) -> list[str]:
    """Lines of a table, the longest class first.

    Args:
        kernels: name, seconds on the device and number of launches of each.
    """
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
