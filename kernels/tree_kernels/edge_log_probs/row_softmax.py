"""Softmax statistics of a chunk of logit rows, and their gradient with respect to the logits.

With s = cap(z) / T and p = softmax(s): log p_t = s_t - lse, H = sum p (lse - s), and
d log p_t / d s = onehot_t - p, d H / d s = -p (s - lse + H). Legend: r rows, e edges, V vocabulary.
"""

from typing import NamedTuple

import torch

from tree_kernels.edge_log_probs.edge_rows import EdgeRows


class RowStatistics(NamedTuple):
    """Per row of a chunk; None where not asked for."""

    lse_r: torch.Tensor
    entropy_r: torch.Tensor | None
    sum_pi_squared_r: torch.Tensor | None


def scaled_scores(
    logits_rV: torch.Tensor, temperature: torch.Tensor | float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores s [r, V] = cap(logits) / temperature, and tanh(logits / softcap) if there is a cap."""
    tanh_rV = None if softcap is None else torch.tanh(logits_rV / softcap)
    capped_rV = logits_rV if tanh_rV is None or softcap is None else tanh_rV * softcap
    if isinstance(temperature, float) and temperature == 1.0:
        return capped_rV, tanh_rV
    return capped_rV / temperature, tanh_rV


def row_statistics(scores_rV: torch.Tensor, *, entropy: bool, sum_pi_squared: bool) -> RowStatistics:
    """Log-sum-exp, and on request entropy and sum of squared probabilities, of each row."""
    lse_r = torch.logsumexp(scores_rV, dim=-1)
    entropy_r = sum_pi_squared_r = None
    if entropy or sum_pi_squared:
        shifted_rV = scores_rV - lse_r[:, None]
        p_rV = torch.exp(shifted_rV)
        if sum_pi_squared:
            sum_pi_squared_r = p_rV.square().sum(-1)
        if entropy:
            # A sum of positive terms: lse - sum(p * s) would cancel. A logit of -inf adds nothing.
            entropy_r = -torch.where(p_rV > 0, p_rV * shifted_rV, 0).sum(-1)
    return RowStatistics(lse_r, entropy_r, sum_pi_squared_r)


def logits_gradient(
    scores_rV: torch.Tensor,
    tanh_rV: torch.Tensor | None,
    temperature: torch.Tensor | float,
    lse_r: torch.Tensor,
    entropy_r: torch.Tensor | None,
    row_e: torch.Tensor,
    target_e: torch.Tensor,
    grad_log_prob_e: torch.Tensor,
    grad_entropy_e: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient [r, V] of sum(grad_log_prob * log_prob) + sum(grad_entropy * entropy) over a chunk's edges."""
    shifted_rV = scores_rV - lse_r[:, None]
    p_rV = torch.exp(shifted_rV)
    weight_r = torch.zeros_like(lse_r).index_add_(0, row_e, grad_log_prob_e)
    grad_rV = p_rV * -weight_r[:, None]
    grad_rV.index_put_((row_e, target_e), grad_log_prob_e, accumulate=True)
    if grad_entropy_e is not None and entropy_r is not None:
        weight_r = torch.zeros_like(lse_r).index_add_(0, row_e, grad_entropy_e)
        surprise_rV = torch.where(p_rV > 0, p_rV * (shifted_rV + entropy_r[:, None]), 0)
        grad_rV.sub_(surprise_rV.mul_(weight_r[:, None]))
    if not (isinstance(temperature, float) and temperature == 1.0):
        grad_rV.div_(temperature)
    if tanh_rV is not None:
        grad_rV.mul_(1 - tanh_rV.square())
    return grad_rV


def per_edge(
    rows: EdgeRows, picked_E: torch.Tensor, statistics_U3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy and sum of squares of each edge [E], in the caller's order.

    Args:
        rows: the unique rows.
        picked_E: score of each edge's target, in row order.
        statistics_U3: log-sum-exp, entropy and sum of squared probabilities of each row.
    """
    statistics_E3 = torch.empty(rows.num_edges, 3, dtype=picked_E.dtype, device=picked_E.device)
    statistics_E3[rows.order] = statistics_U3[rows.row]
    log_prob_E = torch.empty_like(picked_E)
    log_prob_E[rows.order] = picked_E
    log_prob_E -= statistics_E3[:, 0]
    return log_prob_E, statistics_E3[:, 1].clone(), statistics_E3[:, 2].clone()
