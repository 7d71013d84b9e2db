"""Stands in for flash-attn: rows end to end, each attended alone by torch."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: Sequence[int], scale: float | None
) -> torch.Tensor:
    """Causal attention [N, Hq, D] of the rows between `offsets`."""
    parts = []
    for start, end in pairwise(offsets):
        inputs = (t[start:end].transpose(0, 1) for t in (q, k, v))
        attended = scaled_dot_product_attention(*inputs, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)
