"""The gated delta rule in tiles: dense products inside all tiles at once, then states down the tree of tiles.

This is the chunked form of Gated DeltaNet (Yang et al. 2024) with the tree's mask instead of the causal one. In a tile
with entry state S, let G_i be the sum of g over i and its ancestors in the tile, and D_ij = exp(G_i - G_j) if j is i or
an ancestor of i, else 0:

    (I + beta_i D_ij k_i.k_j) U = beta (V - exp(G) K S),   O = exp(G) Q S + (D * Q K^T) U,
    S_p = exp(G_p) S + sum_j D_pj k_j u_j^T   for every token p after which a state leaves the tile.

Legend: N unique tokens, T tiles, C tokens of a tile, W tiles of one depth, X states that leave them, H value heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.host_copy import to_device
from tree_kernels.tree_gated_delta_rule.tiles import tile_plan
from tree_kernels.tree_layout import TreeLayout, kept

TILE_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wave:
    """Tiles of one depth; their entry states come from the previous wave."""

    first: int
    """First tile."""
    last: int
    """Tile after the last one."""
    entry_W: torch.Tensor | None
    """int64 [W], index among the states that leave the previous wave; None at the roots."""
    exit_tile_X: torch.Tensor
    """int64 [X], tile of each state that leaves, relative to `first`."""
    exit_row_X: torch.Tensor
    """int64 [X], row in the tile of each state that leaves."""
    wanted: torch.Tensor
    """int64, indices among the X of the states that the caller requested."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TileTensors:
    """A tile plan on the layout's device."""

    token_TC: torch.Tensor
    """int64 [T, C], tokens of each tile, padded with N."""
    place_N: torch.Tensor
    """int64 [N], tile * C + row of each token."""
    visible_TCC: torch.Tensor
    """bool [T, C, C], True if row j is row i or an ancestor of row i."""
    waves: tuple[Wave, ...]
    """Waves from the roots down."""
    wanted_order: torch.Tensor
    """int64, index of each wanted state among those that the waves collect."""


def chunked_delta_rule(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NHV: torch.Tensor,
    g_NH: torch.Tensor,
    beta_NH: torch.Tensor,
    layout: TreeLayout,
    scale: float,
    initial_state_HKV: torch.Tensor,
    wanted: tuple[int, ...],
    *,
    tile_tokens: int = TILE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, Hv, V] in v's dtype and the states after the `wanted` tokens, in the accumulation dtype.

    Gradients come from autograd. Other arguments are as in `reference_delta_rule`.
    """
    tiles = tile_tensors(layout, tile_tokens, wanted)
    dtype = accumulation_dtype(v_NHV.dtype)
    group = v_NHV.shape[1] // k_NHK.shape[1]
    q_THCK, k_THCK = (tiled(t.to(dtype), tiles).repeat_interleave(group, dim=1) for t in (q_NHK, k_NHK))
    v_THCV = tiled(v_NHV.to(dtype), tiles)
    beta_THC1 = tiled(beta_NH.to(dtype).unsqueeze(-1), tiles)
    decay_THCC, entry_decay_THC1 = path_decays(g_NH, tiles, dtype)

    overlap_THCC = beta_THC1 * decay_THCC * (k_THCK @ k_THCK.transpose(-1, -2))
    right_THCM = torch.cat([beta_THC1 * v_THCV, beta_THC1 * entry_decay_THC1 * k_THCK], dim=-1)
    solved_THCM = torch.linalg.solve_triangular(overlap_THCC, right_THCM, upper=False, unitriangular=True)
    own_THCV, reads_THCK = solved_THCM.split([v_THCV.shape[-1], k_THCK.shape[-1]], dim=-1)
    written = []

    def write(span: slice, entry_WHKV: torch.Tensor) -> torch.Tensor:
        written.append(own_THCV[span] - reads_THCK[span] @ entry_WHKV)
        return written[-1]

    entry_THKV, states = states_down(tiles, k_THCK, decay_THCC, entry_decay_THC1, initial_state_HKV, write)
    scores_THCC = decay_THCC * (q_THCK @ k_THCK.transpose(-1, -2))
    out_THCV = scale * ((entry_decay_THC1 * q_THCK) @ entry_THKV + scores_THCC @ torch.cat(written))
    return untiled(out_THCV, tiles).to(v_NHV.dtype), states


def path_decays(g_NH: torch.Tensor, tiles: TileTensors, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay between the rows of each tile [T, H, C, C], 0 if row i does not see j, and from its entry [T, H, C, 1].

    `g_NH` is the natural logarithm of the decay, `dtype` that of the results.
    """
    # Path sums in float64, because only their differences matter and their gradients nearly cancel.
    g_THC1 = tiled(g_NH.double().unsqueeze(-1), tiles)
    path_THC = (tiles.visible_TCC.double().unsqueeze(1) @ g_THC1).squeeze(-1)
    between_THCC = (path_THC.unsqueeze(-1) - path_THC.unsqueeze(-2)).to(dtype)
    decay_THCC = between_THCC.masked_fill(~tiles.visible_TCC.unsqueeze(1), float("-inf")).exp()
    return decay_THCC, path_THC.to(dtype).exp().unsqueeze(-1)


def states_down(
    tiles: TileTensors,
    k_THCK: torch.Tensor,
    decay_THCC: torch.Tensor,
    entry_decay_THC1: torch.Tensor,
    initial_state_HKV: torch.Tensor,
    write: Callable[[slice, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """States that enter the tiles [T, H, K, V], and the wanted states in the caller's order.

    Args:
        tiles: tiles of the layout.
        k_THCK: keys of the written values.
        decay_THCC: decay between rows, from `path_decays`.
        entry_decay_THC1: decay from the entry to each row, from `path_decays`.
        initial_state_HKV: state before the roots.
        write: maps a range of W tiles and their entry states [W, H, K, V] to the values they write [W, H, C, V].
    """
    entries, states = [], [initial_state_HKV.new_zeros(0, *initial_state_HKV.shape)]
    left_XHKV = initial_state_HKV.unsqueeze(0)
    for wave in tiles.waves:
        span = slice(wave.first, wave.last)
        tiles_W = wave.last - wave.first
        entry_WHKV = left_XHKV.expand(tiles_W, -1, -1, -1) if wave.entry_W is None else left_XHKV[wave.entry_W]
        written_WHCV = write(span, entry_WHKV)
        entries.append(entry_WHKV)
        tile_X, row_X = wave.exit_tile_X, wave.exit_row_X
        weight_XHC1 = decay_THCC[span][tile_X, :, row_X].unsqueeze(-1)
        kept_XH11 = entry_decay_THC1[span][tile_X, :, row_X].unsqueeze(-1)
        added_XHKV = (k_THCK[span][tile_X] * weight_XHC1).transpose(-1, -2) @ written_WHCV[tile_X]
        left_XHKV = kept_XH11 * entry_WHKV[tile_X] + added_XHKV
        states.append(left_XHKV[wave.wanted])
    return torch.cat(entries), torch.cat(states)[tiles.wanted_order]


@kept
def tile_tensors(layout: TreeLayout, tile_tokens: int, wanted: tuple[int, ...]) -> TileTensors:
    """The tiles of a layout on its device; cached with it."""
    plan = tile_plan(layout, tile_tokens, wanted)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return to_device(values.astype(np.int64), layout.device)

    token_TC = tensor(plan.token)
    # Padding rows are not seen by other rows, because their token N is later than all and their end is 0.
    end_M = functional.pad(layout.subtree_end.long(), (0, 1))
    visible_TCC = (token_TC.unsqueeze(1) <= token_TC.unsqueeze(2)) & (
        token_TC.unsqueeze(2) < end_M[token_TC].unsqueeze(1)
    )
    exit_tile, exit_row = plan.tile_of_token[plan.exit_token], plan.row_of_token[plan.exit_token]
    first_exit = exit_tile.searchsorted(plan.depth_start)
    collected = []
    waves = []
    for depth in range(len(plan.depth_start) - 1):
        first, last = plan.depth_start[depth : depth + 2].tolist()
        exits = slice(first_exit[depth], first_exit[depth + 1])
        is_wanted = (plan.wanted >= exits.start) & (plan.wanted < exits.stop)
        collected += is_wanted.nonzero()[0].tolist()
        entry_W = plan.entry[first:last] - first_exit[depth - 1] if depth else None
        waves.append(
            Wave(
                first=first,
                last=last,
                entry_W=None if entry_W is None else tensor(entry_W),
                exit_tile_X=tensor(exit_tile[exits] - first),
                exit_row_X=tensor(exit_row[exits]),
                wanted=tensor(plan.wanted[is_wanted] - exits.start),
            )
        )
    return TileTensors(
        token_TC=token_TC,
        place_N=tensor(plan.tile_of_token * token_TC.shape[1] + plan.row_of_token),
        visible_TCC=visible_TCC,
        waves=tuple(waves),
        wanted_order=tensor(np.argsort(np.array(collected, dtype=np.int64))),
    )


def tiled(t_NHD: torch.Tensor, tiles: TileTensors) -> torch.Tensor:
    """Gather tokens [N, H, D] into tiles [T, H, C, D], padded with zeros."""
    return functional.pad(t_NHD, (0, 0, 0, 0, 0, 1))[tiles.token_TC].transpose(1, 2)


def untiled(t_THCD: torch.Tensor, tiles: TileTensors) -> torch.Tensor:
    """The inverse of `tiled`, [N, H, D]."""
    return t_THCD.transpose(1, 2).flatten(0, 1)[tiles.place_N]
