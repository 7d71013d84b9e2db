"""Tree attention with torch's FlexAttention: CUDA only, block-sparse, compiled once per set of options.

Legend: N unique tokens, P past tokens, M = P + N keys, H query heads, D head size (values may have another).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, flex_attention

from tree_kernels.tree_attention.block_lists import FOREVER, block_relations, key_depths, key_ends, listed
from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_layout import TreeLayout, kept
from tree_kernels.triton_support import DTYPES

BLOCK = 128
MAX_HEAD_SIZE = 256
VARIANTS = 64


def flex_unavailable_reason(
    device: torch.device, dtype: torch.dtype, head_size: int, *, deterministic: bool = False
) -> str | None:
    """Why FlexAttention cannot run, or None if it can."""
    if device.type != "cuda":
        return f"FlexAttention needs a CUDA device, received {device}"
    if dtype not in DTYPES:
        return f"FlexAttention needs one of {DTYPES}, received {dtype}"
    if head_size > MAX_HEAD_SIZE:
        return f"FlexAttention needs a head size <= {MAX_HEAD_SIZE}, received {head_size}"
    if deterministic:
        return "torch does not promise FlexAttention's gradients to be deterministic, received deterministic=True"
    return None


def flex_attention_of_tree(
    q_NHD: torch.Tensor,
    k_MHD: torch.Tensor,
    v_MHD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    layout: TreeLayout,
    rule: ScoreRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, Hq, D] in q's dtype and log-sum-exp float32 [N, Hq]; arguments as in `reference_attention`.

    N and P are padded to whole blocks, and padding queries are dropped.
    """
    num_tokens, heads, _ = q_NHD.shape
    value_size = v_MHD.shape[-1]
    if num_tokens == 0:
        nothing = q_NHD.new_zeros(0, heads, value_size) + q_NHD.sum() * 0
        return nothing, q_NHD.new_zeros(q_NHD.shape[:2], dtype=torch.float32)
    out_1HND, aux = _compiled_flex()(
        _padded(q_NHD),
        _padded(k_MHD),
        _padded(v_MHD),
        score_mod=_softcap_mod(rule.softcap, q_NHD.device),
        block_mask=tree_block_mask(layout, rule.window),
        scale=rule.scale,
        enable_gqa=q_NHD.shape[1] != k_MHD.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    out_NHD = out_1HND[0, :, :num_tokens, :value_size].transpose(0, 1)
    lse_NH = aux.lse[0, :, :num_tokens].transpose(0, 1)
    if sinks_H is not None:
        plain_lse_NH, lse_NH = lse_NH, torch.logaddexp(lse_NH, sinks_H.float())
        out_NHD = (out_NHD * torch.exp(plain_lse_NH - lse_NH)[..., None]).to(q_NHD.dtype)
    return out_NHD, lse_NH


@kept
def tree_block_mask(layout: TreeLayout, window: int | None = None) -> BlockMask:
    """The BlockMask of a layout; cached with it. Padding queries see the last real key, so that no row is empty."""
    num_keys = layout.past_length + layout.num_tokens
    end_M, depth_M = key_ends(layout).clone(), key_depths(layout)
    end_M[num_keys - 1] = FOREVER
    # Padding queries get the depth of the last key, so that no window hides it from them.
    depth_N = torch.cat([layout.depth, layout.depth[-1].expand(-layout.num_tokens % BLOCK)])
    # Padding queries are dropped, so they may see all of a fully visible block.
    lists = listed(*block_relations(layout, BLOCK, BLOCK, window, whole_queries=False))
    # A tensor, because a captured int would be a constant and every new past length would compile again.
    offset = torch.tensor(layout.past_length, dtype=torch.int32, device=layout.device)

    def sees(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return (kv <= q + offset) & (q + offset < end_M[kv])

    return BlockMask.from_kv_blocks(
        lists.partial_count[None, None],
        lists.partial_index[None, None],
        lists.full_count[None, None],
        lists.full_index[None, None],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees if window is None else and_masks(sees, _window_mod(depth_N, depth_M, window)),
        seq_lengths=(len(depth_N), len(end_M)),
    )


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """One compiled function for all lengths, with one variant per combination of dtype, head layout and options."""
    # Beyond torch's limit of 8 variants, fullgraph raises; without fullgraph the dense fallback would run silently.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@functools.cache
def _softcap_mod(softcap: float | None, device: torch.device) -> Callable[..., torch.Tensor] | None:
    if softcap is None:
        return None
    # A tensor, because torch 2.11 cannot compile a captured float with dynamic shapes.
    cap = torch.tensor(softcap, dtype=torch.float32, device=device)

    def capped(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _window_mod(depth_N: torch.Tensor, depth_M: torch.Tensor, window: int) -> Callable[..., torch.Tensor]:
    def is_near(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return depth_N[q] - depth_M[kv] < window

    return is_near


def _padded(t_NHD: torch.Tensor) -> torch.Tensor:
    """[1, H, N, D], zero-padded: N to whole blocks, D to a power of two of at least 16."""
    length, _, size_D = t_NHD.shape
    wide_D = max(16, 1 << (size_D - 1).bit_length())
    t_1HND = t_NHD.transpose(0, 1)[None]
    return torch.nn.functional.pad(t_1HND, (0, wide_D - size_D, 0, -length % BLOCK))
