"""Edge log-probs from hidden states, a chunk of rows at a time; the backward recomputes each chunk's logits.

No tensor of [rows, V] outlives its chunk. Legend: N tokens, C hidden size, V vocabulary, E edges, U unique rows,
u rows of a chunk.
"""

from typing import Any

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.edge_log_probs.edge_rows import EdgeRows
from tree_kernels.edge_log_probs.edge_values import EdgeValues
from tree_kernels.edge_log_probs.products import LONGEST_SUM, add_product, logits_of, product
from tree_kernels.edge_log_probs.row_softmax import logits_gradient, per_edge, row_statistics, scaled_scores


def chunked_edge_log_probs(
    hidden_NC: torch.Tensor,
    head_weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    rows: EdgeRows,
    *,
    entropy: bool,
    softcap: float | None,
    sum_pi_squared: bool,
    chunk_rows: int,
) -> EdgeValues:
    """Log-probs, entropies and sums of squared probabilities, each [E] in the accumulation dtype.

    Args:
        hidden_NC: [N, C].
        head_weight_VC: [V, C].
        bias_V: [V] or None.
        rows: the unique rows of the edges.
        entropy: also return entropies.
        softcap: c in c * tanh(logit / c).
        sum_pi_squared: also return the sum over the vocabulary of squared probabilities, without gradient.
        chunk_rows: rows of logits alive at a time.
    """
    log_prob_E, entropy_E, squared_E = _ChunkedEdges.apply(
        hidden_NC, head_weight_VC, bias_V, rows, entropy, softcap, sum_pi_squared, chunk_rows
    )
    return EdgeValues(log_prob_E, entropy_E if entropy else None, squared_E if sum_pi_squared else None)


def _working_weight(weight_VC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight as `product` wants it: converted once instead of once per chunk where products cannot mix dtypes."""
    return weight_VC if weight_VC.device.type == "cuda" else weight_VC.to(dtype)


class _ChunkedEdges(torch.autograd.Function):
    """Saves only the log-sum-exp and the entropy of each row besides the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: torch.Tensor,
        head_weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        rows: EdgeRows,
        entropy: bool,
        softcap: float | None,
        sum_pi_squared: bool,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = accumulation_dtype(hidden_NC.dtype)
        weight_VC = _working_weight(head_weight_VC, dtype)
        # Columns that are not asked for stay zero: log-sum-exp, entropy, sum of squares.
        statistics_U3 = torch.zeros(rows.num_rows, 3, dtype=dtype, device=hidden_NC.device)
        picked_E = torch.empty(rows.num_edges, dtype=dtype, device=hidden_NC.device)
        for chunk in rows.chunks(chunk_rows):
            logits_uV = _chunk_logits(hidden_NC[rows.source[chunk.rows]], weight_VC, bias_V, dtype)
            scores_uV, _ = scaled_scores(logits_uV, rows.temperature(chunk, dtype), softcap)
            for column, values in enumerate(row_statistics(scores_uV, entropy=entropy, sum_pi_squared=sum_pi_squared)):
                if values is not None:
                    statistics_U3[chunk.rows, column] = values
            picked_E[chunk.edges] = scores_uV[rows.row_in_chunk(chunk), rows.target[chunk.edges]]
        log_prob_E, entropy_E, squared_E = per_edge(rows, picked_E, statistics_U3)
        ctx.mark_non_differentiable(*((squared_E,) if entropy else (entropy_E, squared_E)))
        ctx.save_for_backward(hidden_NC, head_weight_VC, bias_V, statistics_U3)
        ctx.rows, ctx.softcap, ctx.entropy, ctx.chunk_rows = rows, softcap, entropy, chunk_rows
        return log_prob_E, entropy_E, squared_E

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor, _squared: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NC, head_weight_VC, bias_V, statistics_U3 = ctx.saved_tensors
        rows: EdgeRows = ctx.rows
        dtype, device = statistics_U3.dtype, statistics_U3.device
        factor_dtype = hidden_NC.dtype if hidden_NC.is_cuda else dtype
        weight_VC = _working_weight(head_weight_VC, dtype)
        grad_log_prob_E = grad_log_prob_E[rows.order]
        grad_entropy_E = grad_entropy_E[rows.order]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden_NC = torch.zeros(hidden_NC.shape, dtype=dtype, device=device) if needs_hidden else None
        dweight_VC = torch.zeros(head_weight_VC.shape, dtype=dtype, device=device) if needs_weight else None
        dbias_V = torch.zeros(head_weight_VC.shape[0], dtype=dtype, device=device) if needs_bias else None
        for chunk in rows.chunks(ctx.chunk_rows):
            source_u = rows.source[chunk.rows]
            hidden_uC = hidden_NC[source_u]
            with torch.autocast(hidden_NC.device.type, enabled=False):
                logits_uV = _chunk_logits(hidden_uC, weight_VC, bias_V, dtype)
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
                if dbias_V is not None:
                    dbias_V += dlogits_uV.sum(0)
                factor_uV = dlogits_uV.to(factor_dtype)
                if dhidden_NC is not None:
                    dhidden_NC.index_add_(0, source_u, product(factor_uV, weight_VC, dtype))
                if dweight_VC is not None:
                    add_product(factor_uV.T, hidden_uC, out=dweight_VC)
        return (
            None if dhidden_NC is None else dhidden_NC.to(hidden_NC.dtype),
            None if dweight_VC is None else dweight_VC.to(head_weight_VC.dtype),
            None if dbias_V is None or bias_V is None else dbias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _chunk_logits(
    hidden_uC: torch.Tensor, weight_VC: torch.Tensor, bias_V: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    logits_uV = logits_of(hidden_uC, weight_VC, dtype, longest_sum=LONGEST_SUM)
    return logits_uV if bias_V is None else logits_uV.add_(bias_V.to(dtype))
