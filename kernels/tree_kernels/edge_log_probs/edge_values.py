"""What a caller asks for per edge, and what every implementation returns."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeOptions:
    """How edges are scored, and what is returned besides their log-probs."""

    entropy: bool
    """also return entropies"""
    softcap: float | None
    """c in c * tanh(logit / c), before the temperature; None: no cap"""
    sum_pi_squared: bool
    """also return sums of squared probabilities"""
    chunk_rows: int
    """rows of logits alive at a time"""


class EdgeValues(NamedTuple):
    """One number per edge, float32, or float64 for float64 input; None where not asked for."""

    log_prob: torch.Tensor
    """[E], natural logarithm"""
    entropy: torch.Tensor | None
    """[E], in nats, of the distribution that the edge is drawn from"""
    sum_pi_squared: torch.Tensor | None
    """[E], sum over the vocabulary of squared probabilities, without gradient"""
