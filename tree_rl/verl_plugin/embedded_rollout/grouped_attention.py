"""Attention for decoding that treats all query heads of one key-value head as additional queries.

So it never repeats keys and values; with a mask, `transformers` copies the whole cache in each step for that.
Shapes: R rows, H query heads, G key-value heads, Q queries, K keys, D head size, E that of values.
"""

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED_SDPA = "tree_rl_grouped_sdpa"


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with a boolean mask and the signature of `transformers`' attention functions.

    Args:
        query: [R, H, Q, D].
        key: [R, G, K, D].
        value: [R, G, K, E].
        attention_mask: bool [R, 1, Q, K].
        scaling: None means 1 / sqrt(D).

    Returns:
        Output [R, Q, H, E], and None for the weights.
    """
    rows, heads, queries, head_size = query.shape
    groups = key.shape[1]
    repeats = heads // groups
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, groups, repeats * queries, head_size),
        key,
        value,
        attn_mask=attention_mask if queries == 1 else attention_mask.repeat(1, 1, repeats, 1),
        scale=scaling,
    )
    out = out.unflatten(2, (repeats, queries)).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, queries, heads, -1), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED_SDPA, grouped_sdpa)
