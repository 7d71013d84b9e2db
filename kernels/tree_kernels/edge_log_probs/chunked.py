"""Edge log-probs from hidden states, a chunk of rows at a time; the backward recomputes each chunk's logits.

No tensor of [rows, V] outlives its chunk. Legend: N tokens, C hidden size, V vocabulary, E edges, R unique rows,
r rows of a chunk.
"""

from typing import Any

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.edge_log_probs.edge_rows import EdgeRows
from tree_kernels.edge_log_probs.row_softmax import logits_gradient, row_statistics, scaled_scores


def chunked_edge_log_probs(
    hidden_NC: torch.Tensor,
    head_weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    rows: EdgeRows,
    *,
    entropy: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs [E] and entropies [E] in the accumulation dtype.

    Args:
        hidden_NC: [N, C].
        head_weight_VC: [V, C].
        bias_V: [V] or None.
        rows: the unique rows of the edges.
        entropy: also return entropies.
        softcap: c in c * tanh(logit / c).
    """
    log_prob_E, entropy_E = _ChunkedEdges.apply(hidden_NC, head_weight_VC, bias_V, rows, entropy, softcap)
    return log_prob_E, entropy_E if entropy else None


def _matmul(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b accumulated and returned in `dtype`; on CUDA half-precision factors stay as they are."""
    if a.dtype == b.dtype == dtype:
        return a @ b
    if a.device.type == "cuda" and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _working_weight(weight_VC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight as `_matmul` wants it: converted once instead of once per chunk where products cannot mix dtypes."""
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = accumulation_dtype(hidden_NC.dtype)
        weight_VC = _working_weight(head_weight_VC, dtype)
        lse_R = torch.empty(rows.num_rows, dtype=dtype, device=hidden_NC.device)
        entropy_R = torch.empty_like(lse_R) if entropy else None
        picked_E = torch.empty(rows.num_edges, dtype=dtype, device=hidden_NC.device)
        for chunk in rows.chunks:
            logits_rV = _chunk_logits(hidden_NC[rows.source[chunk.rows]], weight_VC, bias_V, dtype)
            scores_rV, _ = scaled_scores(logits_rV, rows.temperature(chunk), softcap)
            statistics = row_statistics(scores_rV, entropy=entropy, sum_pi_squared=False)
            lse_R[chunk.rows] = statistics.lse_r
            if entropy_R is not None and statistics.entropy_r is not None:
                entropy_R[chunk.rows] = statistics.entropy_r
            picked_E[chunk.edges] = scores_rV[rows.row_in_chunk(chunk), rows.target[chunk.edges]]
        log_prob_E = torch.empty_like(picked_E)
        log_prob_E[rows.order] = picked_E - lse_R[rows.row]
        entropy_E = torch.empty_like(picked_E)
        if entropy_R is None:
            ctx.mark_non_differentiable(entropy_E)
        else:
            entropy_E[rows.order] = entropy_R[rows.row]
        ctx.save_for_backward(hidden_NC, head_weight_VC, bias_V, lse_R, entropy_R)
        ctx.rows, ctx.softcap = rows, softcap
        return log_prob_E, entropy_E

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NC, head_weight_VC, bias_V, lse_R, entropy_R = ctx.saved_tensors
        rows: EdgeRows = ctx.rows
        dtype, factor_dtype = lse_R.dtype, hidden_NC.dtype if hidden_NC.is_cuda else lse_R.dtype
        weight_VC = _working_weight(head_weight_VC, dtype)
        grad_log_prob_E = grad_log_prob_E[rows.order]
        grad_entropy_E = grad_entropy_E[rows.order]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden_NC = torch.zeros(hidden_NC.shape, dtype=dtype, device=hidden_NC.device) if needs_hidden else None
        dweight_VC = torch.zeros(head_weight_VC.shape, dtype=dtype, device=lse_R.device) if needs_weight else None
        dbias_V = torch.zeros(head_weight_VC.shape[0], dtype=dtype, device=lse_R.device) if needs_bias else None
        for chunk in rows.chunks:
            source_r = rows.source[chunk.rows]
            hidden_rC = hidden_NC[source_r]
            with torch.autocast(hidden_NC.device.type, enabled=False):
                logits_rV = _chunk_logits(hidden_rC, weight_VC, bias_V, dtype)
                dlogits_rV = logits_gradient(
                    *scaled_scores(logits_rV, rows.temperature(chunk), ctx.softcap),
                    rows.temperature(chunk),
                    lse_R[chunk.rows],
                    None if entropy_R is None else entropy_R[chunk.rows],
                    rows.row_in_chunk(chunk),
                    rows.target[chunk.edges],
                    grad_log_prob_E[chunk.edges],
                    None if entropy_R is None else grad_entropy_E[chunk.edges],
                )
                if dbias_V is not None:
                    dbias_V += dlogits_rV.sum(0)
                factor_rV = dlogits_rV.to(factor_dtype)
                if dhidden_NC is not None:
                    dhidden_NC.index_add_(0, source_r, _matmul(factor_rV, weight_VC, dtype))
                if dweight_VC is not None:
                    dweight_VC += _matmul(factor_rV.T, hidden_rC, dtype)
        return (
            None if dhidden_NC is None else dhidden_NC.to(hidden_NC.dtype),
            None if dweight_VC is None else dweight_VC.to(head_weight_VC.dtype),
            None if dbias_V is None or bias_V is None else dbias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _chunk_logits(
    hidden_rC: torch.Tensor, weight_VC: torch.Tensor, bias_V: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    logits_rV = _matmul(hidden_rC, weight_VC.T, dtype)
    return logits_rV if bias_V is None else logits_rV.add_(bias_V.to(dtype))
