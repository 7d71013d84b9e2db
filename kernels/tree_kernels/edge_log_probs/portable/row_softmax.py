"""Softmax statistics of chunks of logit rows, and their gradient with respect to the logits.

With s = cap(z) / T and p = softmax(s): log p_t = s_t - lse, H = sum p (lse - s), and
d log p_t / d s = onehot_t - p, d H / d s = -p (s - lse + H).
Legend: E edges, U unique rows, r rows and e edges of a chunk, V vocabulary.
"""

from collections.abc import Callable

import torch

from tree_kernels.edge_log_probs.edge_rows import Chunk, EdgeRows
from tree_kernels.edge_log_probs.edge_values import EdgeOptions


def edge_statistics(
    rows: EdgeRows, chunk_logits: Callable[[torch.Tensor], torch.Tensor], options: EdgeOptions, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Log-prob, entropy and sum of squares of every edge, computed in chunks of rows.

    Args:
        rows: unique rows of the edges.
        chunk_logits: maps the sources [r] of a chunk to logits [r, V] in `dtype`.
        options: requested values; the others stay 0.
        dtype: accumulation dtype.

    Returns:
        log-prob [E], entropy [E] and sum of squared probabilities [E] in the caller's order; and log-sum-exp, entropy
        and sum of squares of each row, [U, 3].
    """
    statistics_U3 = torch.zeros(rows.num_rows, 3, dtype=dtype, device=rows.source.device)
    picked_E = torch.empty(rows.num_edges, dtype=dtype, device=rows.source.device)
    for chunk in rows.chunks(options.chunk_rows):
        scores_rV, _ = _scaled_scores(
            chunk_logits(rows.source[chunk.rows]), rows.temperature(chunk, dtype), options.softcap
        )
        _write_statistics(scores_rV, options, statistics_U3[chunk.rows])
        picked_E[chunk.edges] = scores_rV[rows.row_in_chunk(chunk), rows.target[chunk.edges]]
    statistics_E3 = torch.empty(rows.num_edges, 3, dtype=dtype, device=rows.source.device)
    statistics_E3[rows.order] = statistics_U3[rows.row]
    log_prob_E = torch.empty_like(picked_E)
    log_prob_E[rows.order] = picked_E
    log_prob_E -= statistics_E3[:, 0]
    return (log_prob_E, statistics_E3[:, 1].clone(), statistics_E3[:, 2].clone()), statistics_U3


def _scaled_scores(
    logits_rV: torch.Tensor, temperature: torch.Tensor | float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores s [r, V] = cap(logits) / temperature, and tanh(logits / softcap) if there is a cap."""
    tanh_rV = None if softcap is None else torch.tanh(logits_rV / softcap)
    capped_rV = logits_rV if tanh_rV is None or softcap is None else tanh_rV * softcap
    if isinstance(temperature, float) and temperature == 1.0:
        return capped_rV, tanh_rV
    return capped_rV / temperature, tanh_rV


def _write_statistics(scores_rV: torch.Tensor, options: EdgeOptions, statistics_r3: torch.Tensor) -> None:
    """Write log-sum-exp and, if requested, entropy and sum of squared probabilities of each row."""
    lse_r = torch.logsumexp(scores_rV, dim=-1)
    statistics_r3[:, 0] = lse_r
    if options.entropy or options.sum_pi_squared:
        shifted_rV = scores_rV - lse_r[:, None]
        p_rV = torch.exp(shifted_rV)
        if options.sum_pi_squared:
            statistics_r3[:, 2] = p_rV.square().sum(-1)
        if options.entropy:
            # A sum of positive terms, because lse - sum(p * s) would cancel. A logit of -inf adds 0.
            statistics_r3[:, 1] = -torch.where(p_rV > 0, p_rV * shifted_rV, 0).sum(-1)


def logits_gradient(
    logits_rV: torch.Tensor,
    rows: EdgeRows,
    chunk: Chunk,
    statistics_U3: torch.Tensor,
    grads_E: tuple[torch.Tensor, torch.Tensor],
    options: EdgeOptions,
) -> torch.Tensor:
    """Gradient [r, V] of sum(grad_log_prob * log_prob) + sum(grad_entropy * entropy) over a chunk's edges.

    Args:
        logits_rV: logits of the chunk's rows.
        rows: unique rows of the edges.
        chunk: the current rows.
        statistics_U3: from `edge_statistics`.
        grads_E: gradients of log-probs and of entropies, in row order.
        options: the entropy's gradient counts only if the entropy was requested.
    """
    temperature = rows.temperature(chunk, statistics_U3.dtype)
    scores_rV, tanh_rV = _scaled_scores(logits_rV, temperature, options.softcap)
    lse_r, entropy_r, _ = statistics_U3[chunk.rows].unbind(1)
    row_e, grad_log_prob_e = rows.row_in_chunk(chunk), grads_E[0][chunk.edges]
    shifted_rV = scores_rV - lse_r[:, None]
    p_rV = torch.exp(shifted_rV)
    weight_r = torch.zeros_like(lse_r).index_add_(0, row_e, grad_log_prob_e)
    grad_rV = p_rV * -weight_r[:, None]
    grad_rV.index_put_((row_e, rows.target[chunk.edges]), grad_log_prob_e, accumulate=True)
    if options.entropy:
        weight_r = torch.zeros_like(lse_r).index_add_(0, row_e, grads_E[1][chunk.edges])
        surprise_rV = torch.where(p_rV > 0, p_rV * (shifted_rV + entropy_r[:, None]), 0)
        grad_rV.sub_(surprise_rV.mul_(weight_r[:, None]))
    if not (isinstance(temperature, float) and temperature == 1.0):
        grad_rV.div_(temperature)
    if tanh_rV is not None:
        grad_rV.mul_(1 - tanh_rV.square())
    return grad_rV
