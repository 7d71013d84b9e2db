"""The recurrence of Mamba 2 on the tiles of the gated delta rule: dense products inside all tiles at once, then states
down the tree of tiles.

This is the chunked form of Dao and Gu (2024), section 6, with the tree's mask instead of the causal one. In a tile with
entry state S, and G_i and D_ij as in the gated delta rule (`path_decays`):

    O = exp(G) C S + (D * C B^T) (dt X),   S_p = exp(G_p) S + sum_j D_pj b_j (dt_j x_j)^T.

Legend: N unique tokens, T tiles, Q tokens of a tile, H heads.
"""

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.tree_gated_delta_rule.portable.chunked import (
    TILE_TOKENS,
    path_decays,
    states_down,
    tile_tensors,
    tiled,
    untiled,
)
from tree_kernels.tree_layout import TreeLayout


def chunked_state_space(
    x_NHP: torch.Tensor,
    b_NGK: torch.Tensor,
    c_NGK: torch.Tensor,
    g_NH: torch.Tensor,
    dt_NH: torch.Tensor,
    layout: TreeLayout,
    initial_state_HKP: torch.Tensor,
    wanted: tuple[int, ...],
    *,
    tile_tokens: int = TILE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, H, P] in x's dtype and the states after the `wanted` tokens, in the accumulation dtype.

    Gradients come from autograd. Other arguments are as in `reference_state_space`.
    """
    tiles = tile_tensors(layout, tile_tokens, wanted)
    dtype = accumulation_dtype(x_NHP.dtype)
    group = x_NHP.shape[1] // b_NGK.shape[1]
    b_THQK, c_THQK = (tiled(t.to(dtype), tiles).repeat_interleave(group, dim=1) for t in (b_NGK, c_NGK))
    written_THQP = tiled(dt_NH.to(dtype).unsqueeze(-1) * x_NHP.to(dtype), tiles)
    decay_THQQ, entry_decay_THQ1 = path_decays(g_NH, tiles, dtype)
    entry_THKP, states = states_down(
        tiles, b_THQK, decay_THQQ, entry_decay_THQ1, initial_state_HKP, lambda span, _: written_THQP[span]
    )
    scores_THQQ = decay_THQQ * (c_THQK @ b_THQK.transpose(-1, -2))
    out_THQP = (entry_decay_THQ1 * c_THQK) @ entry_THKP + scores_THQQ @ written_THQP
    return untiled(out_THQP, tiles).to(x_NHP.dtype), states
