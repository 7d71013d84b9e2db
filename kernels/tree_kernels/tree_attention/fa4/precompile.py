"""Compiles flash-attn-4's kernels ahead of time, on a machine with or without a GPU.

It runs the production path on fake tensors, which have shapes but no data. The cache is valid for one minor Python
version and one version each of flash-attn-4, the CuTe compiler and tvm-ffi, which form its folder's name.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tree_kernels.tree_attention.fa4.autograd import DTYPES, package_reason, version_reason
from tree_kernels.tree_attention.fa4.fa4_plan import FORWARD_BLOCKS, VALUE_SIZES, Fa4Plan, fa4_plan
from tree_kernels.tree_attention.fa4.leaf_rows import LeafRows
from tree_kernels.tree_layout import TreeLayout

TOKENS = 300
"""Any length works: kernels do not depend on it."""
ROWS = (2, 300)
"""Numbers of leaf rows: beyond 256 rows FA4 uses other kernels."""
STREAMING_MULTIPROCESSORS = "132"
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class PrecompileError(ValueError):
    """The requested kernels cannot be compiled here."""


def cache_environment(arch: str, cache: Path) -> dict[str, str]:
    """Environment variables with which flash-attn-4 compiles for `arch` (such as "sm_90a") into `cache`."""
    architecture = re.fullmatch(r"(sm_90)a?", arch)
    if architecture is None:
        raise PrecompileError(f"arch: expected sm_90a (Hopper), received {arch!r}")
    return {
        "FLASH_ATTENTION_ARCH": architecture[1],
        "CUTE_DSL_ARCH": architecture[1] + "a",
        "FLASH_ATTENTION_NUM_SMS": STREAMING_MULTIPROCESSORS,
        **runtime_environment(cache),
    }


def runtime_environment(cache: Path) -> dict[str, str]:
    """Environment variables with which a training process finds the kernels in `cache`."""
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache.resolve()),
    }


def precompile(
    *,
    head_sizes: Sequence[int],
    query_heads_per_key_head: Sequence[int],
    dtypes: Sequence[str],
    windows: Sequence[bool],
    arch: str,
    cache: Path,
    report: Callable[[str], None],
) -> int:
    """Compile forward and backward of every combination into `cache`, except for kernels that are already there.

    Args:
        head_sizes: D, each of FORWARD_BLOCKS.
        query_heads_per_key_head: ratios Hq / Hkv.
        dtypes: "bfloat16", "float16".
        windows: False for full attention and leaf rows, True for attention with a window of any size.
        arch: compilation target, "sm_90a".
        cache: folder of the compiled kernels.
        report: receives one line per combination.

    Returns:
        number of newly compiled kernels.

    Raises:
        PrecompileError: flash-attn-4 is not installed, or already imported, so that it no longer reads its settings;
            or a head size, dtype or target is not supported.
    """
    _check(head_sizes, dtypes)
    os.environ.update(cache_environment(arch, cache))
    before = len(list(compiled_kernels(cache)))
    for head_size, ratio, dtype, window in product(head_sizes, query_heads_per_key_head, dtypes, windows):
        _compile(head_size, ratio, DTYPE_NAMES[dtype], window)
        total = len(list(compiled_kernels(cache)))
        report(f"head size {head_size}, {ratio} query heads per key head, {dtype}, window {window}: {total} kernels")
    return len(list(compiled_kernels(cache))) - before


def _check(head_sizes: Sequence[int], dtypes: Sequence[str]) -> None:
    for name, received, supported in (("head size", head_sizes, FORWARD_BLOCKS), ("dtype", dtypes, DTYPE_NAMES)):
        unsupported = [value for value in received if value not in supported]
        if unsupported:
            raise PrecompileError(f"{name}: expected some of {tuple(supported)}, received {unsupported}")
    reason = package_reason() or next(filter(None, map(version_reason, head_sizes)), None)
    if reason is not None:
        raise PrecompileError(reason)
    if "flash_attn.cute.cache_utils" in sys.modules:
        raise PrecompileError("expected a fresh process, received one in which flash-attn-4 is imported already")


def compiled_kernels(cache: Path) -> Iterator[Path]:
    """Object files in a cache folder."""
    return cache.glob("*/*/*.o")


def _compile(head_size: int, ratio: int, dtype: torch.dtype, window: bool) -> None:
    """Compile for two key heads, for a forest and for leaf rows; without autograd, which would initialise a device."""
    # Imported late, because flash-attn-4 reads the environment variables on import.
    from tree_kernels.tree_attention.fa4 import calls

    layout = TreeLayout.from_subtree_end(torch.arange(1, TOKENS + 1, dtype=torch.int32))
    real = fa4_plan(layout, head_size=head_size, heads=2 * ratio, window=TOKENS // 2 if window else None)
    with FakeTensorMode():
        plans: list[Fa4Plan | LeafRows] = [_without_data(real)]
        if not window:
            offsets = (torch.empty(rows + 1, dtype=torch.int32, device="cuda") for rows in ROWS)
            plans += [
                LeafRows(
                    query_offsets=vector, key_offsets=vector, longest_query=TOKENS, longest_key=TOKENS, copies=None
                )
                for vector in offsets
            ]
        value_size = VALUE_SIZES[head_size]
        heads = 2 if value_size == head_size else 2 * ratio
        q = torch.empty(TOKENS, 2 * ratio, head_size, dtype=dtype, device="cuda")
        k = torch.empty(TOKENS, heads, head_size, dtype=dtype, device="cuda")
        v = torch.empty(TOKENS, heads, value_size, dtype=dtype, device="cuda")
        out, grad_out = (torch.empty(TOKENS, 2 * ratio, value_size, dtype=dtype, device="cuda") for _ in range(2))
        lse = torch.empty(2 * ratio, TOKENS, device="cuda")
        for plan in plans:
            calls.forward(q, k, v, plan, 1.0)
            calls.backward(q, k, v, out, lse, grad_out, plan, 1.0)


def _without_data(plan: Any) -> Any:
    """A plan, or a part of one, with CUDA tensors of the same layout without data.

    They are created directly, because torch without CUDA cannot convert tensors to CUDA.
    """
    changes: dict[str, Any] = {}
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        elif is_dataclass(value):
            changes[field.name] = _without_data(value)
    return replace(plan, **changes)
