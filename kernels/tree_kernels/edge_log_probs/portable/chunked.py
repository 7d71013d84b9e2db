"""Edge log-probs in chunks of rows, from hidden states (the backward recomputes logits) or from given logits.

Except for given logits and their gradient, a tensor [rows, V] exists for one chunk only. Legend: N tokens, C hidden
size, V vocabulary, E edges, R given rows of logits, U unique rows, u rows of a chunk.
"""

from typing import Any

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.edge_log_probs.edge_rows import EdgeRows
from tree_kernels.edge_log_probs.edge_values import EdgeOptions, EdgeValues
from tree_kernels.edge_log_probs.portable.row_softmax import edge_statistics, logits_gradient
from tree_kernels.edge_log_probs.products import LONGEST_SUM, add_product, logits_of, product


def chunked_edge_log_probs(
    hidden_NC: torch.Tensor,
    head_weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    rows: EdgeRows,
    options: EdgeOptions,
) -> EdgeValues:
    """Edge values [E] in the accumulation dtype, from hidden states."""
    return _values(_ChunkedEdges.apply(hidden_NC, head_weight_VC, bias_V, rows, options), options)


def chunked_logits_edge_log_probs(logits_RV: torch.Tensor, rows: EdgeRows, options: EdgeOptions) -> EdgeValues:
    """Edge values [E] in the accumulation dtype, from logits [R, V]."""
    return _values(_ChunkedLogitEdges.apply(logits_RV, rows, options), options)


def _values(of_edges: tuple[torch.Tensor, torch.Tensor, torch.Tensor], options: EdgeOptions) -> EdgeValues:
    log_prob_E, entropy_E, squared_E = of_edges
    return EdgeValues(log_prob_E, entropy_E if options.entropy else None, squared_E if options.sum_pi_squared else None)


def _working_weight(weight_VC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in the dtype that `product` needs, converted once instead of once per chunk."""
    return weight_VC if weight_VC.device.type == "cuda" else weight_VC.to(dtype)


class _ChunkedEdges(torch.autograd.Function):
    """Saves only the statistics of each row besides the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: torch.Tensor,
        head_weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        rows: EdgeRows,
        options: EdgeOptions,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-prob, entropy and sum of squares [E]; zeros if not requested."""
        dtype = accumulation_dtype(hidden_NC.dtype)
        weight_VC = _working_weight(head_weight_VC, dtype)
        of_edges, statistics_U3 = edge_statistics(
            rows, lambda source_u: _logits(hidden_NC[source_u], weight_VC, bias_V, dtype), options, dtype
        )
        ctx.mark_non_differentiable(*of_edges[2 if options.entropy else 1 :])
        ctx.save_for_backward(hidden_NC, head_weight_VC, bias_V, statistics_U3)
        ctx.rows, ctx.options = rows, options
        return of_edges

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor, _squared: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients in the dtypes of the inputs, summed in the accumulation dtype."""
        hidden_NC, head_weight_VC, bias_V, statistics_U3 = ctx.saved_tensors
        rows: EdgeRows = ctx.rows
        dtype, device = statistics_U3.dtype, statistics_U3.device
        factor_dtype = hidden_NC.dtype if hidden_NC.is_cuda else dtype
        weight_VC = _working_weight(head_weight_VC, dtype)
        grads_E = (grad_log_prob_E[rows.order], grad_entropy_E[rows.order])
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dhidden_NC = torch.zeros(hidden_NC.shape, dtype=dtype, device=device) if needs_hidden else None
        dweight_VC = torch.zeros(head_weight_VC.shape, dtype=dtype, device=device) if needs_weight else None
        dbias_V = torch.zeros(head_weight_VC.shape[0], dtype=dtype, device=device) if needs_bias else None
        for chunk in rows.chunks(ctx.options.chunk_rows):
            source_u = rows.source[chunk.rows]
            hidden_uC = hidden_NC[source_u]
            with torch.autocast(hidden_NC.device.type, enabled=False):
                logits_uV = _logits(hidden_uC, weight_VC, bias_V, dtype)
                dlogits_uV = logits_gradient(logits_uV, rows, chunk, statistics_U3, grads_E, ctx.options)
                if dbias_V is not None:
                    dbias_V += dlogits_uV.sum(0)
                factor_uV = dlogits_uV.to(factor_dtype)
                if dhidden_NC is not None:
                    dhidden_NC.index_add_(0, source_u, product(factor_uV, weight_VC, dtype))
                if dweight_VC is not None:
                    add_product(factor_uV.T, hidden_uC, out=dweight_VC)
        totals = zip((dhidden_NC, dweight_VC, dbias_V), (hidden_NC, head_weight_VC, bias_V), strict=True)
        return *(None if total is None or of is None else total.to(of.dtype) for total, of in totals), None, None


class _ChunkedLogitEdges(torch.autograd.Function):
    """Saves the statistics of each row besides the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_RV: torch.Tensor, rows: EdgeRows, options: EdgeOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-prob, entropy and sum of squares [E]; zeros if not requested."""
        dtype = accumulation_dtype(logits_RV.dtype)
        of_edges, statistics_U3 = edge_statistics(rows, lambda source_u: logits_RV[source_u].to(dtype), options, dtype)
        ctx.mark_non_differentiable(*of_edges[2 if options.entropy else 1 :])
        ctx.save_for_backward(logits_RV, statistics_U3)
        ctx.rows, ctx.options = rows, options
        return of_edges

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor, _squared: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits_RV, statistics_U3 = ctx.saved_tensors
        rows: EdgeRows = ctx.rows
        grads_E = (grad_log_prob_E[rows.order], grad_entropy_E[rows.order])
        dlogits_RV = torch.zeros_like(logits_RV)
        for chunk in rows.chunks(ctx.options.chunk_rows):
            source_u = rows.source[chunk.rows]
            logits_uV = logits_RV[source_u].to(statistics_U3.dtype)
            dlogits_uV = logits_gradient(logits_uV, rows, chunk, statistics_U3, grads_E, ctx.options)
            dlogits_RV.index_add_(0, source_u, dlogits_uV.to(logits_RV.dtype))
        return dlogits_RV, None, None


def _logits(
    hidden_uC: torch.Tensor, weight_VC: torch.Tensor, bias_V: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    logits_uV = logits_of(hidden_uC, weight_VC, dtype, longest_sum=LONGEST_SUM)
    return logits_uV if bias_V is None else logits_uV.add_(bias_V.to(dtype))
