"""Options and results of edge log-probs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeOptions:
    """How edges are scored, and what is returned besides their log-probs."""

    entropy: bool
    softcap: float | None
    """Cap c in c * tanh(logit / c), before the temperature; None: no cap."""
    sum_pi_squared: bool
    chunk_rows: int
    """Rows of logits alive at a time."""


class EdgeValues(NamedTuple):
    """One number per edge, float32, or float64 for float64 input; None if not requested."""

    log_prob: torch.Tensor
    """[E], natural logarithm."""
    entropy: torch.Tensor | None
    """[E], entropy in nats of the distribution at the edge's source."""
    sum_pi_squared: torch.Tensor | None
    """[E], sum over the vocabulary of squared probabilities, without gradient."""
