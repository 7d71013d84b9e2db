"""Edge log-probs on CUDA: cuBLAS for matrix products, one Triton pass over a piece of logits for all else.

The forward splits the logits by rows, because a softmax needs whole rows. The backward splits by columns, so that the
head weight's gradient is final piece by piece, without a float32 copy. Legend: N tokens, C hidden size, V vocabulary,
v columns of a piece, E edges, U unique rows, u rows of a piece, R given rows of logits.
"""

from functools import partial
from typing import Any

import torch

from tree_kernels.edge_log_probs.edge_rows import EdgeRows
from tree_kernels.edge_log_probs.edge_values import EdgeOptions, EdgeValues
from tree_kernels.edge_log_probs.products import (
    LONGEST_SUM_BESIDE_TARGETS,
    add_product,
    logits_of,
    product,
    write_rounded_product,
)
from tree_kernels.edge_log_probs.triton_kernels.launch import (
    RowStatistics,
    unwritten_statistics,
    write_logits_gradient,
    write_statistics,
)

COLUMN_STEP, ROW_STEP = 256, 128


def triton_edge_log_probs(
    hidden_NC: torch.Tensor,
    head_weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    rows: EdgeRows,
    options: EdgeOptions,
) -> EdgeValues:
    """Edge values, float32 [E], from hidden states; at most `chunk_rows` times V logits are alive at a time."""
    return EdgeValues(*_TritonEdges.apply(hidden_NC, head_weight_VC, bias_V, rows, options))


def triton_logits_edge_log_probs(logits_RV: torch.Tensor, rows: EdgeRows, options: EdgeOptions) -> EdgeValues:
    """Edge values, float32 [E], from logits [R, V]; nothing else of their size exists but their gradient."""
    return EdgeValues(*_TritonLogitEdges.apply(logits_RV, rows, options))


class _TritonEdges(torch.autograd.Function):
    """Saves the statistics of each row besides the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: torch.Tensor,
        head_weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        rows: EdgeRows,
        options: EdgeOptions,
    ) -> tuple[torch.Tensor | None, ...]:
        bias_V = None if bias_V is None else bias_V.contiguous()
        statistics = unwritten_statistics(rows, options, hidden_NC.device)
        size = _even_pieces(rows.num_rows, options.chunk_rows, ROW_STEP)
        shape = (min(size, rows.num_rows), head_weight_VC.shape[0])
        logits_uV = torch.empty(shape, dtype=torch.float32, device=hidden_NC.device)
        for start in range(0, rows.num_rows, size):
            pairs = slice(start, min(start + size, rows.num_rows))
            piece_uV, hidden_uC = logits_uV[: pairs.stop - start], _of_rows(hidden_NC, rows, pairs)
            _write_logits(hidden_uC, head_weight_VC, piece_uV)
            factors = None if hidden_uC.dtype == torch.float32 else (hidden_uC, head_weight_VC)
            write_statistics(
                piece_uV, rows, pairs, statistics, bias_V=bias_V, softcap=options.softcap, factors=factors,
                gathers=False,
            )  # fmt: skip
        return _returned(ctx, (hidden_NC, head_weight_VC, bias_V), rows, options, statistics)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor | None, _squared: object
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NC, weight_VC, bias_V, *saved_U = ctx.saved_tensors
        rows: EdgeRows = ctx.rows
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grads_E = _in_row_order(rows, grad_log_prob_E, grad_entropy_E)
        vocabulary, device = weight_VC.shape[0], hidden_NC.device
        hidden_UC = _of_rows(hidden_NC, rows, slice(0, rows.num_rows))
        dhidden_UC = torch.empty(hidden_UC.shape, dtype=torch.float32, device=device) if needs_hidden else None
        dweight_VC = torch.empty_like(weight_VC) if needs_weight else None
        dbias_V = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
        most_columns = ctx.options.chunk_rows * vocabulary // max(rows.num_rows, 1)
        size = _even_pieces(vocabulary, most_columns, COLUMN_STEP)
        logits = torch.empty(rows.num_rows * min(size, vocabulary), dtype=torch.float32, device=device)
        factors = logits if hidden_NC.dtype == torch.float32 else torch.empty_like(logits, dtype=hidden_NC.dtype)
        for start in range(0, vocabulary, size):
            columns = slice(start, min(start + size, vocabulary))
            weight_vC = weight_VC[columns]
            shape = (rows.num_rows, len(weight_vC))
            logits_Uv, factor_Uv = (buffer[: shape[0] * shape[1]].view(shape) for buffer in (logits, factors))
            _write_logits(hidden_UC, weight_vC, logits_Uv)
            bias_v = None if bias_V is None else bias_V[columns]
            write_logits_gradient(
                logits_Uv, factor_Uv, rows, tuple(saved_U), grads_E, first_column=start, bias_V=bias_v,
                softcap=ctx.options.softcap, first_pair_R=None,
            )  # fmt: skip
            if dhidden_UC is not None:
                write_product = add_product if start else partial(product, dtype=torch.float32)
                write_product(factor_Uv, weight_vC, out=dhidden_UC)
            if dweight_VC is not None:
                write_rounded_product(factor_Uv.T, hidden_UC, dweight_VC[columns])
            if dbias_V is not None:
                dbias_V[columns] = factor_Uv.sum(0, dtype=torch.float32)
        dhidden_NC = None if dhidden_UC is None else _to_sources(dhidden_UC, rows, hidden_NC)
        return dhidden_NC, dweight_VC, dbias_V, None, None


class _TritonLogitEdges(torch.autograd.Function):
    """Saves the statistics of each row besides the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_RV: torch.Tensor, rows: EdgeRows, options: EdgeOptions
    ) -> tuple[torch.Tensor | None, ...]:
        if logits_RV.stride(1) != 1:
            logits_RV = logits_RV.contiguous()
        statistics = unwritten_statistics(rows, options, logits_RV.device)
        everything = slice(0, rows.num_rows)
        write_statistics(
            logits_RV, rows, everything, statistics, bias_V=None, softcap=options.softcap, factors=None, gathers=True
        )
        return _returned(ctx, (logits_RV,), rows, options, statistics)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor | None, _squared: object
    ) -> tuple[torch.Tensor | None, ...]:
        logits_RV, *saved_U = ctx.saved_tensors
        rows: EdgeRows = ctx.rows
        dlogits_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
        every_row = torch.arange(logits_RV.shape[0] + 1, device=logits_RV.device)
        write_logits_gradient(
            logits_RV, dlogits_RV, rows, tuple(saved_U), _in_row_order(rows, grad_log_prob_E, grad_entropy_E),
            first_column=0, bias_V=None, softcap=ctx.options.softcap,
            first_pair_R=torch.searchsorted(rows.source, every_row),
        )  # fmt: skip
        return dlogits_RV, None, None


def _write_logits(hidden_UC: torch.Tensor, weight_vC: torch.Tensor, out_Uv: torch.Tensor) -> None:
    logits_of(hidden_UC, weight_vC, torch.float32, longest_sum=LONGEST_SUM_BESIDE_TARGETS, out=out_Uv)


def _returned(
    ctx: Any, inputs: tuple[torch.Tensor | None, ...], rows: EdgeRows, options: EdgeOptions, statistics: RowStatistics
) -> tuple[torch.Tensor | None, ...]:
    """Save for the backward and return log-prob, entropy and sum of squares [E], None if not requested."""
    ctx.save_for_backward(*inputs, statistics.inverse_temperature_U, statistics.lse_U, statistics.entropy_U)
    ctx.rows, ctx.options = rows, options
    if statistics.squared_E is not None:
        ctx.mark_non_differentiable(statistics.squared_E)
    return statistics.log_prob_E, statistics.entropy_E, statistics.squared_E


def _in_row_order(
    rows: EdgeRows, grad_log_prob_E: torch.Tensor, grad_entropy_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    first = grad_log_prob_E.float()[rows.order]
    return first, first if grad_entropy_E is None else grad_entropy_E.float()[rows.order]


def _even_pieces(total: int, most: int, step: int) -> int:
    """Piece size for the fewest even pieces of at most `most`, rounded up to a multiple of `step` if larger than it."""
    pieces = -(-total // max(most, 1))
    size = max(-(-total // max(pieces, 1)), 1)
    return size if size < step else -(-size // step) * step


def _is_every_source(hidden_NC: torch.Tensor, rows: EdgeRows) -> bool:
    """True if row u belongs to hidden state u, which follows without reading from N distinct ascending sources."""
    return not rows.sources_repeat and rows.num_rows == hidden_NC.shape[0]


def _of_rows(hidden_NC: torch.Tensor, rows: EdgeRows, pairs: slice) -> torch.Tensor:
    """Hidden states [u, C] of the rows `pairs`."""
    return hidden_NC[pairs] if _is_every_source(hidden_NC, rows) else hidden_NC[rows.source[pairs]]


def _to_sources(dhidden_UC: torch.Tensor, rows: EdgeRows, hidden_NC: torch.Tensor) -> torch.Tensor:
    """Gradient [N, C] of the hidden states, from the gradient of the rows."""
    if _is_every_source(hidden_NC, rows):
        return dhidden_UC.to(hidden_NC.dtype)
    if rows.sources_repeat:
        dhidden_NC = torch.zeros(hidden_NC.shape, dtype=torch.float32, device=hidden_NC.device)
        return dhidden_NC.index_add_(0, rows.source, dhidden_UC).to(hidden_NC.dtype)
    dhidden_NC = torch.zeros_like(hidden_NC)
    dhidden_NC[rows.source] = dhidden_UC.to(hidden_NC.dtype)
    return dhidden_NC
