"""The recurrence of Mamba 2 tile by tile, on the tiles of the gated delta rule: dense products inside all tiles at
once, then states down the tree of tiles.

Inside a tile with entry state S, path decay G_i and D_ij as in `tree_gated_delta_rule.chunked`, with the tree's mask in
place of the causal one of Dao and Gu (2024), section 6:

    O = exp(G) C S + (D * C B^T) (dt X),   S_p = exp(G_p) S + sum_j D_pj b_j (dt_j x_j)^T.

Legend: N unique tokens, T tiles, Q tokens of a tile, W tiles of one depth, X states that leave it, H heads.
"""

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.layout import TreeLayout
from tree_kernels.tree_gated_delta_rule.chunked import TILE_TOKENS, tile_tensors, tiled


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
    """Outputs [N, H, P] in x's dtype and the states after the wanted tokens, in the dtype of the sums.

    Arguments as in `reference_state_space`; gradients come from autograd.
    """
    tiles = tile_tensors(layout, tile_tokens, wanted)
    dtype = accumulation_dtype(x_NHP.dtype)
    group = x_NHP.shape[1] // b_NGK.shape[1]
    b_THQK, c_THQK = (tiled(t.to(dtype), tiles).repeat_interleave(group, dim=1) for t in (b_NGK, c_NGK))
    written_THQP = tiled(dt_NH.to(dtype).unsqueeze(-1) * x_NHP.to(dtype), tiles)
    # Path sums in float64: their differences decide the decay between tokens, and their gradients nearly cancel.
    g_THQ1 = tiled(g_NH.double().unsqueeze(-1), tiles)
    path_THQ = (tiles.visible_TCC.double().unsqueeze(1) @ g_THQ1).squeeze(-1)
    between_THQQ = (path_THQ.unsqueeze(-1) - path_THQ.unsqueeze(-2)).to(dtype)
    decay_THQQ = between_THQQ.masked_fill(~tiles.visible_TCC.unsqueeze(1), float("-inf")).exp()
    entry_decay_THQ1 = path_THQ.to(dtype).exp().unsqueeze(-1)
    entries, states = [], [initial_state_HKP.new_zeros(0, *initial_state_HKP.shape)]
    left_XHKP = initial_state_HKP.unsqueeze(0)
    for wave in tiles.waves:
        span = slice(wave.first, wave.last)
        tiles_W = wave.last - wave.first
        entry_WHKP = left_XHKP.expand(tiles_W, -1, -1, -1) if wave.entry_W is None else left_XHKP[wave.entry_W]
        entries.append(entry_WHKP)
        tile_X, row_X = wave.exit_tile_X, wave.exit_row_X
        weight_XHQ1 = decay_THQQ[span][tile_X, :, row_X].unsqueeze(-1)
        kept_XH11 = entry_decay_THQ1[span][tile_X, :, row_X].unsqueeze(-1)
        added_XHKP = (b_THQK[span][tile_X] * weight_XHQ1).transpose(-1, -2) @ written_THQP[span][tile_X]
        left_XHKP = kept_XH11 * entry_WHKP[tile_X] + added_XHKP
        states.append(left_XHKP[wave.wanted])
    scores_THQQ = decay_THQQ * (c_THQK @ b_THQK.transpose(-1, -2))
    out_THQP = (entry_decay_THQ1 * c_THQK) @ torch.cat(entries) + scores_THQQ @ written_THQP
    out_NHP = out_THQP.transpose(1, 2).flatten(0, 1)[tiles.place_N]
    return out_NHP.to(x_NHP.dtype), torch.cat(states)[tiles.wanted_order]
