"""Causal attention of rows laid end to end, by the fastest kernel there is for them.

Legend: B rows, F packed tokens, H heads, D head size of queries and keys, E of values, L tokens of a row.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tree_kernels.host_copy import to_device
from tree_kernels.implementation import implementation_to_run
from tree_kernels.tree_layout import TreeLayout
from tree_rl.tree.forest.jagged import offsets_of

OP = "packed_attention"
IMPLEMENTATIONS = ("fa4", "cudnn", "fa2", "flash", "flex", "sdpa")
"""Implementations of packed attention, in the order in which "auto" tries them. `fa4`, `fa2` (flash-attention 2, as
torch ships it) and `flex` run all rows at once, the others row by row."""
BACKENDS = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}
HALF = (torch.bfloat16, torch.float16)
LARGEST_FLASH4_HEAD = 128
FLASH4_LATENT = (192, 128)
"""Head sizes of keys and of values that flash-attn-4 also runs."""
BEYOND_ONE_TILE = 193
"""Least row length that flash-attn-4 is told: for rows of a single tile it would compile other kernels."""


class PackedLayout:
    """Where rows begin and end: `lengths` in tokens, `offsets` as int32 [B + 1] on the device.

    It is no dataclass: checkpointing passes an opaque object on by reference.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.offsets = to_device(offsets_of(self.lengths).astype(np.int32), device)

    @functools.cached_property
    def rows_apart(self) -> TreeLayout:
        """The rows as trees that share nothing."""
        ends = np.repeat(np.cumsum(self.lengths), self.lengths).astype(np.int32)
        return TreeLayout.from_subtree_end(torch.from_numpy(ends)).to(self.offsets.device)

    @functools.cached_property
    def flex_mask(self) -> BlockMask:
        """FlexAttention's mask of earlier tokens of the same row."""
        total, device = sum(self.lengths), self.offsets.device
        row_of_token = torch.bucketize(torch.arange(total, device=device), self.offsets[1:], right=True)

        def same_row(b: Any, h: Any, query: Any, key: Any) -> Any:
            return (key <= query) & (row_of_token[query] == row_of_token[key])

        return create_block_mask(same_row, None, None, total, total, device=device, BLOCK_SIZE=128)


def unavailable_reason(
    impl: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int = LARGEST_FLASH4_HEAD,
    value_size: int | None = None,
) -> str | None:
    """Why an implementation cannot run, or None if it can; `value_size` None is that of the keys."""
    sizes = (head_size, value_size or head_size)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{OP}: expected one of {('auto', *IMPLEMENTATIONS)}, received {impl!r}")
    if impl == "sdpa":
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, received {device}"
    if impl != "flex" and dtype not in HALF:
        return f"it needs one of {HALF}, received {dtype}"
    if impl != "fa4" and sizes[0] != sizes[1]:
        return f"it was run with keys and values of one size, received {sizes[0]} and {sizes[1]}"
    if impl == "fa2":
        return _varlen_import_error()
    if impl != "fa4":
        return None
    if max(sizes) > LARGEST_FLASH4_HEAD and sizes != FLASH4_LATENT:
        return f"it was run with heads of up to {LARGEST_FLASH4_HEAD}, received {head_size}"
    if torch.cuda.get_device_capability(device)[0] < 9:
        return f"it needs Hopper or later, received {torch.cuda.get_device_name(device)}"
    return _flash4_import_error()


def chosen_implementation(
    device: torch.device, dtype: torch.dtype, head_size: int = LARGEST_FLASH4_HEAD, value_size: int | None = None
) -> str:
    """What "auto" runs; arguments as in `unavailable_reason`."""
    place = (device, dtype, head_size, value_size)
    return next(impl for impl in IMPLEMENTATIONS if unavailable_reason(impl, *place) is None)


def packed_attention(
    q_FHD: torch.Tensor,
    k_FHD: torch.Tensor,
    v_FHD: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Causal attention inside each row: [F, Hq, E] from queries [F, Hq, D], keys [F, Hkv, D], values [F, Hkv, E].

    `scale` multiplies the scores; None takes D ** -0.5. `impl` is "auto" or one of `IMPLEMENTATIONS`.

    Raises:
        UnsupportedImplementation: `impl` cannot run on this device or dtype.
    """
    problem = {"device": q_FHD.device, "dtype": q_FHD.dtype}
    problem |= {"head_size": q_FHD.shape[-1], "value_size": v_FHD.shape[-1]}
    impl = implementation_to_run(OP, impl, chosen_implementation, unavailable_reason, **problem)
    if impl == "fa4":
        return _flash4(q_FHD, k_FHD, v_FHD, layout, scale)
    if impl == "fa2":
        return _flash2(q_FHD, k_FHD, v_FHD, layout, scale)
    if impl == "flex":
        return _flex(q_FHD, k_FHD, v_FHD, layout, scale)
    with sdpa_kernel(BACKENDS[impl]) if impl in BACKENDS else nullcontext():
        rows = zip(*(t.split(layout.lengths) for t in (q_FHD, k_FHD, v_FHD)), strict=True)
        return torch.cat([_causal_row(q, k, v, scale) for q, k, v in rows])


@functools.cache
def _flash4_import_error() -> str | None:
    try:
        import flash_attn.cute  # noqa: F401
    except ImportError as error:
        return f"flash-attn-4 does not import: {error}"
    return None


def _flash4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float | None) -> Any:
    from flash_attn.cute import flash_attn_varlen_func

    longest = max(*layout.lengths, BEYOND_ONE_TILE)
    rows: dict[str, Any] = {"cu_seqlens_q": layout.offsets, "cu_seqlens_k": layout.offsets}
    rows |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    out = flash_attn_varlen_func(q, k, v, **rows, softmax_scale=scale, causal=True)
    return out[0] if isinstance(out, tuple) else out


@functools.cache
def _varlen_import_error() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError as error:
        return f"torch {torch.__version__} has no varlen_attn: {error}"
    return None


def _flash2(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float | None) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(layout.lengths)
    # Some releases of torch share key heads unasked and have no such argument.
    shares_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters
    shared: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if shares_heads else {}
    rows = (layout.offsets, layout.offsets, longest, longest)
    return varlen_attn(q, k, v, *rows, scale=scale, window_size=(-1, 0), **shared)


def _causal_row(q_LHD: torch.Tensor, k_LHD: torch.Tensor, v_LHD: torch.Tensor, scale: float | None) -> torch.Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q_LHD, k_LHD, v_LHD))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float | None) -> Any:
    arguments = [t.transpose(0, 1)[None] for t in (q, k, v)]
    gqa = q.shape[1] != k.shape[1]
    out = _compiled_flex()(*arguments, block_mask=layout.flex_mask, scale=scale, enable_gqa=gqa)
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
