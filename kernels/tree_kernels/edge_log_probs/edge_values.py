"""What every implementation of edge log-probs returns."""

from typing import NamedTuple

import torch


class EdgeValues(NamedTuple):
    """One number per edge, float32, or float64 for float64 input; None where not asked for."""

    log_prob: torch.Tensor
    """[E]"""
    entropy: torch.Tensor | None
    """[E], of the distribution that the edge is drawn from"""
    sum_pi_squared: torch.Tensor | None
    """[E], sum over the vocabulary of squared probabilities, without gradient"""
