"""Edge log-probs from rows of logits that a model has already computed, a chunk of rows at a time.

Besides the logits and their gradient no [R, V] tensor exists. Legend: R given rows, V vocabulary, E edges,
U unique (row, temperature) pairs, u those of a chunk.
"""

from typing import Any

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.edge_log_probs.edge_rows import EdgeRows
from tree_kernels.edge_log_probs.edge_values import EdgeValues
from tree_kernels.edge_log_probs.row_softmax import logits_gradient, per_edge, row_statistics, scaled_scores


def chunked_logits_edge_log_probs(
    logits_RV: torch.Tensor,
    rows: EdgeRows,
    *,
    entropy: bool,
    softcap: float | None,
    sum_pi_squared: bool,
    chunk_rows: int,
) -> EdgeValues:
    """Log-probs, entropies and sums of squared probabilities, each [E] in the accumulation dtype.

    Args:
        logits_RV: [R, V].
        rows: the unique rows of the edges.
        entropy: also return entropies.
        softcap: c in c * tanh(logit / c).
        sum_pi_squared: also return the sum over the vocabulary of squared probabilities, without gradient.
        chunk_rows: rows alive in the accumulation dtype at a time.
    """
    log_prob_E, entropy_E, squared_E = _LogitEdges.apply(logits_RV, rows, entropy, softcap, sum_pi_squared, chunk_rows)
    return EdgeValues(log_prob_E, entropy_E if entropy else None, squared_E if sum_pi_squared else None)


class _LogitEdges(torch.autograd.Function):
    """Saves the log-sum-exp and the entropy of each row besides the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_RV: torch.Tensor,
        rows: EdgeRows,
        entropy: bool,
        softcap: float | None,
        sum_pi_squared: bool,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = accumulation_dtype(logits_RV.dtype)
        # Columns that are not asked for stay zero: log-sum-exp, entropy, sum of squares.
        statistics_U3 = torch.zeros(rows.num_rows, 3, dtype=dtype, device=logits_RV.device)
        picked_E = torch.empty(rows.num_edges, dtype=dtype, device=logits_RV.device)
        for chunk in rows.chunks(chunk_rows):
            logits_uV = logits_RV[rows.source[chunk.rows]].to(dtype)
            scores_uV, _ = scaled_scores(logits_uV, rows.temperature(chunk, dtype), softcap)
            for column, values in enumerate(row_statistics(scores_uV, entropy=entropy, sum_pi_squared=sum_pi_squared)):
                if values is not None:
                    statistics_U3[chunk.rows, column] = values
            picked_E[chunk.edges] = scores_uV[rows.row_in_chunk(chunk), rows.target[chunk.edges]]
        log_prob_E, entropy_E, squared_E = per_edge(rows, picked_E, statistics_U3)
        ctx.mark_non_differentiable(*((squared_E,) if entropy else (entropy_E, squared_E)))
        ctx.save_for_backward(logits_RV, statistics_U3)
        ctx.rows, ctx.softcap, ctx.entropy, ctx.chunk_rows = rows, softcap, entropy, chunk_rows
        return log_prob_E, entropy_E, squared_E

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor, _squared: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits_RV, statistics_U3 = ctx.saved_tensors
        rows: EdgeRows = ctx.rows
        dtype = statistics_U3.dtype
        grad_log_prob_E = grad_log_prob_E[rows.order]
        grad_entropy_E = grad_entropy_E[rows.order]
        dlogits_RV = torch.zeros_like(logits_RV)
        for chunk in rows.chunks(ctx.chunk_rows):
            source_u = rows.source[chunk.rows]
            logits_uV = logits_RV[source_u].to(dtype)
            dlogits_uV = logits_gradient(
                *scaled_scores(logits_uV, rows.temperature(chunk, dtype), ctx.softcap),
                rows.temperature(chunk, dtype),
                statistics_U3[chunk.rows, 0],
                statistics_U3[chunk.rows, 1] if ctx.entropy else None,
                rows.row_in_chunk(chunk),
                rows.target[chunk.edges],
                grad_log_prob_E[chunk.edges],
                grad_entropy_E[chunk.edges] if ctx.entropy else None,
            )
            dlogits_RV.index_add_(0, source_u, dlogits_uV.to(logits_RV.dtype))
        return dlogits_RV, None, None, None, None, None
