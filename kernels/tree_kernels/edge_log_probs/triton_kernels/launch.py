"""Launches the two kernels over rows of logits: statistics in the forward, the logits' gradient in the backward.

Legend: R rows of logits, V columns of the piece, U unique (row, temperature) pairs, E edges.
"""

from dataclasses import dataclass

import torch
import triton

from tree_kernels.edge_log_probs.edge_rows import EdgeRows
from tree_kernels.edge_log_probs.edge_values import EdgeOptions
from tree_kernels.edge_log_probs.triton_kernels.row_kernels import gradient_kernel, statistics_kernel
from tree_kernels.triton_support import launch_device

FORWARD_BLOCK, BACKWARD_BLOCK, WARPS = 4096, 2048, 4
"""Fastest of 1024 to 16384 columns and 2 to 16 warps on an H200: 3.8 and 3.4 TB/s; a plain copy reaches 4.0."""
CHANNEL_BLOCK = 1024


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowStatistics:
    """Float32 vectors of the forward: [U] in row order, [E] in the caller's order; None if not requested."""

    inverse_temperature_U: torch.Tensor
    """[U], input: factor on the scores of each row."""
    lse_U: torch.Tensor
    """[U], log-sum-exp."""
    entropy_U: torch.Tensor | None
    log_prob_E: torch.Tensor
    entropy_E: torch.Tensor | None
    squared_E: torch.Tensor | None
    """[E], sum of squared probabilities."""


def unwritten_statistics(rows: EdgeRows, options: EdgeOptions, device: torch.device) -> RowStatistics:
    """Statistics whose results are allocated but not written."""

    def vector(size: int, wanted: bool = True) -> torch.Tensor | None:
        return torch.empty(size, dtype=torch.float32, device=device) if wanted else None

    if isinstance(rows.row_temperature, float):
        factor = torch.full((rows.num_rows,), 1 / rows.row_temperature, dtype=torch.float32, device=device)
    else:
        factor = rows.row_temperature[:, 0].float().reciprocal()
    return RowStatistics(
        inverse_temperature_U=factor,
        lse_U=torch.empty(rows.num_rows, dtype=torch.float32, device=device),
        entropy_U=vector(rows.num_rows, options.entropy),
        log_prob_E=torch.empty(rows.num_edges, dtype=torch.float32, device=device),
        entropy_E=vector(rows.num_edges, options.entropy),
        squared_E=vector(rows.num_edges, options.sum_pi_squared),
    )


def write_statistics(
    logits_RV: torch.Tensor,
    rows: EdgeRows,
    pairs: slice,
    statistics: RowStatistics,
    *,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
    gathers: bool,
) -> None:
    """Fill `statistics` for some pairs and their edges, from one read of their logits.

    Args:
        logits_RV: rows of logits, contiguous along the vocabulary.
        rows: all pairs.
        pairs: the pairs of these logits.
        statistics: written at `pairs` and at their edges.
        bias_V: added to the logits.
        softcap: c in c * tanh(logit / c).
        factors: hidden states [R, C] and head weight [V, C] whose product is the logits; the targets' logits are then
            recomputed with float32 sums. None takes them from the logits.
        gathers: True if `rows.source` gives the row of logits of each pair; False if row r belongs to pair r.
    """
    count, columns = len(range(*pairs.indices(rows.num_rows))), logits_RV.shape[1]
    if not count:
        return
    nothing = statistics.lse_U
    hidden_RC, weight_VC = (nothing[None], nothing[None]) if factors is None else factors
    with launch_device(logits_RV.device):
        statistics_kernel[(count,)](
            logits_RV, logits_RV.stride(0), nothing if bias_V is None else bias_V, hidden_RC, *hidden_RC.stride(),
            weight_VC, *weight_VC.stride(), rows.source[pairs], statistics.inverse_temperature_U[pairs],
            rows.first_edge[pairs.start : pairs.start + count + 1], rows.target, rows.order, nothing[pairs],
            nothing if statistics.entropy_U is None else statistics.entropy_U[pairs], statistics.log_prob_E,
            nothing if statistics.entropy_E is None else statistics.entropy_E,
            nothing if statistics.squared_E is None else statistics.squared_E, columns, hidden_RC.shape[1],
            0.0 if softcap is None else softcap, HAS_BIAS=bias_V is not None, HAS_FACTORS=factors is not None,
            HAS_ROW=gathers, HAS_SOFTCAP=softcap is not None, ENTROPY=statistics.entropy_U is not None,
            SQUARED=statistics.squared_E is not None, BLOCK=_block(columns, FORWARD_BLOCK),
            CHANNEL_BLOCK=_block(hidden_RC.shape[1], CHANNEL_BLOCK), num_warps=WARPS,
        )  # fmt: skip


def write_logits_gradient(
    logits_RV: torch.Tensor,
    gradient_RV: torch.Tensor,
    rows: EdgeRows,
    saved_U: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    grads_E: tuple[torch.Tensor, torch.Tensor],
    *,
    first_column: int,
    bias_V: torch.Tensor | None,
    softcap: float | None,
    first_pair_R: torch.Tensor | None,
) -> None:
    """Write the gradient of the logits, computed in float32, to `gradient_RV`.

    Args:
        logits_RV: all rows of a piece of columns.
        gradient_RV: output; may be the logits themselves.
        rows: the pairs.
        saved_U: inverse temperature, log-sum-exp and entropy from the forward, each [U]; the entropy is None if it was
            not requested.
        grads_E: gradients of log-probs and of entropies, float32 in row order; the second is not read without entropy.
        first_column: vocabulary index of the piece's first column.
        bias_V: the piece's columns of the bias.
        softcap: c in c * tanh(logit / c).
        first_pair_R: int64 [R + 1], first pair that reads each row of logits; None: row r belongs to pair r.
    """
    inverse_temperature_U, lse_U, entropy_U = saved_U
    columns = logits_RV.shape[1]
    block = _block(columns, BACKWARD_BLOCK)
    tiles = logits_RV.shape[0] * triton.cdiv(columns, block)
    if not tiles:
        return
    with launch_device(logits_RV.device):
        gradient_kernel[(tiles,)](
            logits_RV, logits_RV.stride(0), lse_U if bias_V is None else bias_V,
            rows.first_edge if first_pair_R is None else first_pair_R, inverse_temperature_U, lse_U,
            lse_U if entropy_U is None else entropy_U, rows.first_edge, rows.target, *grads_E, gradient_RV,
            gradient_RV.stride(0), columns, first_column, 0.0 if softcap is None else softcap,
            HAS_BIAS=bias_V is not None, HAS_PAIRS=first_pair_R is not None, HAS_SOFTCAP=softcap is not None,
            ENTROPY=entropy_U is not None, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip


def _block(columns: int, most: int) -> int:
    return min(most, triton.next_power_of_2(max(columns, 16)))
