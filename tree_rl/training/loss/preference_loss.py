"""Losses of preference pairs: of the log-probs of two rows' trained tokens (Rafailov et al. 2023, Azar et al. 2024).

Legend: B rows, F flat tokens, P pairs.
"""

import torch
from torch.nn.functional import logsigmoid

SIGMOID, IPO = "sigmoid", "ipo"
LOSS_TYPES = (SIGMOID, IPO)


def sums_of_rows(values_F: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sum of each row in float64, [B], because pairs differ by little of it; differentiable.

    Args:
        values_F: row after row.
        offsets: int64 [B + 1], row boundaries.
    """
    lengths = offsets.diff().to(values_F.device)
    return torch.segment_reduce(values_F.double(), "sum", lengths=lengths, unsafe=True)


def preference_losses(
    log_ratio_chosen_P: torch.Tensor,
    log_ratio_rejected_P: torch.Tensor,
    *,
    beta: float,
    loss_type: str = SIGMOID,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss of every pair, [P].

    With the margin m = log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected):

    * sigmoid: -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m); DPO (arXiv:2305.18290, eq. 7), for s > 0
      conservative DPO (Mitchell 2023, eq. 3)
    * ipo: (m - 1 / (2 beta))^2; IPO (arXiv:2310.12036, eq. 17, where beta is tau)

    Both are TRL's, whose IPO divides each ratio by the number of tokens.

    Args:
        log_ratio_chosen_P: log-prob of the chosen row under the policy, less that under the reference.
        log_ratio_rejected_P: the same of the rejected row.
        beta: strength of the reference, above 0.
        loss_type: one of `LOSS_TYPES`.
        label_smoothing: s, the probability that a label is wrong, from 0 to below 0.5; `ipo` ignores it.
    """
    margin_P = log_ratio_chosen_P - log_ratio_rejected_P
    if loss_type == IPO:
        return (margin_P - 1 / (2 * beta)) ** 2
    agrees_P, disagrees_P = logsigmoid(beta * margin_P), logsigmoid(-beta * margin_P)
    return -(1 - label_smoothing) * agrees_P - label_smoothing * disagrees_P
