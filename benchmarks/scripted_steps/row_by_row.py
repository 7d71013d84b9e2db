"""verl's own engine on machines without flash-attn: attention row by row, log-probs in one pass.

verl loads this module as `model.external_lib`.

Legend: F packed tokens, H heads, D head size.

verl lays rows end to end and relies on flash-attn to keep them apart. transformers' SDPA masks the whole micro-batch
instead, and its cost grows with the square of that; verl itself falls back to a loop over tokens for log-probs.
"""

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tree_rl.benchmark.against_packed.packed_attention import HALF, PackedLayout, packed_attention
from tree_rl.benchmark.against_verl.without_flash_attention_2 import use_one_pass

NAME = "tree_rl_row_by_row"
LAYOUT = "_tree_rl_layout"


def layout_of(position_ids: torch.Tensor) -> PackedLayout:
    """Where rows begin: at position 0. Kept with the tensor, which every layer gets.

    Args:
        position_ids: int64 [1, F].

    Raises:
        ValueError: rows are not laid end to end.
    """
    if not hasattr(position_ids, LAYOUT):
        if position_ids.shape[0] != 1 or position_ids[0, 0] != 0:
            raise ValueError(
                f"{NAME}: expected rows laid end to end, received position ids of shape {tuple(position_ids.shape)}; "
                "set actor_rollout_ref.model.use_remove_padding=true"
            )
        starts = (position_ids[0] == 0).nonzero()[:, 0].tolist()
        ends = [*starts[1:], position_ids.shape[1]]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        setattr(position_ids, LAYOUT, PackedLayout(lengths, position_ids.device))
    layout: PackedLayout = getattr(position_ids, LAYOUT)
    return layout


def row_by_row(
    module: Any,
    query_1HFD: torch.Tensor,
    key_1HFD: torch.Tensor,
    value_1HFD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Signature of transformers' attention interface; the result is [1, F, H, D]."""
    on_gpu = query_1HFD.device.type == "cuda" and query_1HFD.dtype in HALF
    if not on_gpu:  # torch's kernel that keeps no L x L weights in float32 takes no heads in groups
        group = query_1HFD.shape[1] // key_1HFD.shape[1]
        key_1HFD, value_1HFD = (t.repeat_interleave(group, dim=1) for t in (key_1HFD, value_1HFD))
    q_FHD, k_FHD, v_FHD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_1HFD, key_1HFD, value_1HFD))
    out_FHD = packed_attention(
        q_FHD, k_FHD, v_FHD, layout_of(position_ids), scale=scaling, impl="flash" if on_gpu else "sdpa"
    )
    return out_FHD[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, row_by_row)
use_one_pass()
