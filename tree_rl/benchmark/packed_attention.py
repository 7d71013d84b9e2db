"""Causal attention of rows laid end to end: the strongest kernels that a flat run can have here.

Legend: B rows, F packed tokens, H heads, D head size, L tokens of a row.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tree_kernels.host_copy import to_device
from tree_kernels.implementation import UnsupportedImplementation
from tree_rl.tree.forest.jagged import offsets_of

OP = "packed_attention"
IMPLEMENTATIONS = ("fa4", "cudnn", "flash", "flex", "sdpa")
"""In the order in which "auto" tries them: flash-attn-4 over all rows at once; torch's cuDNN or FlashAttention-2 kernel
row by row; FlexAttention with a document mask; whatever torch picks, row by row."""
HALF = (torch.bfloat16, torch.float16)
BLOCK = 128
LARGEST_FLASH4_HEAD = 128
BEYOND_ONE_TILE = 193
"""An upper bound on the row length is enough, and for rows of a single tile flash-attn-4 compiles other kernels."""


class PackedLayout:
    """Where rows begin and end. Opaque, so that checkpointing passes it on by reference.

    Attributes:
        lengths: tokens of each row.
        offsets: int32 [B + 1] on the device.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.offsets = to_device(offsets_of(self.lengths).astype(np.int32), device)
        self._metadata: dict[Hashable, Any] = {}

    def metadata(self, key: Hashable, build: Callable[["PackedLayout"], Any]) -> Any:
        """What `build` makes of this layout, built at the first call with `key` and kept."""
        if key not in self._metadata:
            self._metadata[key] = build(self)
        return self._metadata[key]


def unavailable_reason(
    impl: str, device: torch.device, dtype: torch.dtype, head_size: int = LARGEST_FLASH4_HEAD
) -> str | None:
    """Why an implementation cannot run, or None if it can."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{OP}: expected one of {('auto', *IMPLEMENTATIONS)}, received {impl!r}")
    if impl == "sdpa":
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, received {device}"
    if impl != "flex" and dtype not in HALF:
        return f"it needs one of {HALF}, received {dtype}"
    if impl == "fa4":
        if head_size > LARGEST_FLASH4_HEAD:
            return f"it was run with heads of up to {LARGEST_FLASH4_HEAD}, received {head_size}"
        if torch.cuda.get_device_capability(device)[0] < 9:
            return f"it needs Hopper or later, received {torch.cuda.get_device_name(device)}"
        return _flash4_import_error()
    return None


def chosen_implementation(device: torch.device, dtype: torch.dtype, head_size: int = LARGEST_FLASH4_HEAD) -> str:
    """What "auto" runs."""
    return next(impl for impl in IMPLEMENTATIONS if unavailable_reason(impl, device, dtype, head_size) is None)


def packed_attention(
    q_FHD: torch.Tensor,
    k_FHD: torch.Tensor,
    v_FHD: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Causal attention inside each row.

    Args:
        q_FHD: [F, Hq, D].
        k_FHD: [F, Hkv, D].
        v_FHD: [F, Hkv, D].
        layout: row boundaries.
        scale: factor on the scores; None: D ** -0.5.
        impl: "auto" or one of `IMPLEMENTATIONS`.

    Returns:
        [F, Hq, D].

    Raises:
        UnsupportedImplementation: `impl` cannot run on this device or dtype.
    """
    if impl == "auto":
        impl = chosen_implementation(q_FHD.device, q_FHD.dtype, q_FHD.shape[-1])
    reason = unavailable_reason(impl, q_FHD.device, q_FHD.dtype, q_FHD.shape[-1])
    if reason is not None:
        raise UnsupportedImplementation(OP, impl, reason)
    if impl == "fa4":
        return _flash4(q_FHD, k_FHD, v_FHD, layout, scale)
    if impl == "flex":
        return _flex(q_FHD, k_FHD, v_FHD, layout, scale)
    backends = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "flash": [SDPBackend.FLASH_ATTENTION]}.get(impl)
    return _row_by_row(q_FHD, k_FHD, v_FHD, layout, scale, backends)


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
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=layout.offsets,
        cu_seqlens_k=layout.offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
    )
    return out[0] if isinstance(out, tuple) else out


def _row_by_row(
    q_FHD: torch.Tensor,
    k_FHD: torch.Tensor,
    v_FHD: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    backends: list[SDPBackend] | None,
) -> torch.Tensor:
    outputs = []
    for q, k, v in zip(*(t.split(layout.lengths) for t in (q_FHD, k_FHD, v_FHD)), strict=True):
        q_1HLD, k_1HLD, v_1HLD = (t.transpose(0, 1)[None] for t in (q, k, v))
        is_grouped = q.shape[1] != k.shape[1]
        with nullcontext() if backends is None else sdpa_kernel(backends):
            out_1HLD = scaled_dot_product_attention(
                q_1HLD, k_1HLD, v_1HLD, is_causal=True, scale=scale, enable_gqa=is_grouped
            )
        outputs.append(out_1HLD.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float | None) -> Any:
    mask = layout.metadata("flex_block_mask", _document_mask)
    arguments = [t.transpose(0, 1)[None] for t in (q, k, v)]
    out = _compiled_flex()(*arguments, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _document_mask(layout: PackedLayout) -> BlockMask:
    total = sum(layout.lengths)
    device = layout.offsets.device
    row_of_token = torch.bucketize(torch.arange(total, device=device), layout.offsets[1:], right=True)

    def same_row(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (row_of_token[query] == row_of_token[key])

    return create_block_mask(same_row, None, None, total, total, device=device, BLOCK_SIZE=BLOCK)
