"""The rows' loss, optional path weights around it, and what it reads: one value per position, for the next token of the
row (or, for a critic, the token itself).

With path weights w_k a unique token weighs lambda_t (paper, "Derivation").
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from tree_rl.training.micro_batch import MicroBatch
from tree_rl.tree.forest.jagged import positions_of_rows

LOG_PROBS, ENTROPY, SUM_PI_SQUARED, VALUES = "log_probs", "entropy", "sum_pi_squared", "values"
CANDIDATE_LOG_PROBS = "candidate_log_probs"

Wanted = tuple[str, ...]
"""Names of the outputs that a call asks for: `values` alone for a critic, else `log_probs` and any of the others."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeOutputs:
    """Outputs by name, all of length T; None (a KeyError from `outputs[name]`) if the call did not ask."""

    log_probs: torch.Tensor | None = None
    """[T], log-prob of the next token; 0 where it was not asked for."""
    entropy: torch.Tensor | None = None
    """[T], entropy of the next token's distribution."""
    sum_pi_squared: torch.Tensor | None = None
    """[T], sum of squared probabilities of that distribution, without gradient."""
    values: torch.Tensor | None = None
    """[T], a critic's value of the token itself."""
    candidate_log_probs: torch.Tensor | None = None
    """[T, K], log-probs of the candidates for the next token; None if the rows name none (`Rows.candidates_FK`)."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.present()[name]

    def present(self) -> dict[str, torch.Tensor]:
        """The outputs that were asked for, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if value is not None}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "EdgeOutputs":
        """Apply a function to each output."""
        return EdgeOutputs(**{name: change(value) for name, value in self.present().items()})

    def detach(self) -> "EdgeOutputs":
        """The outputs without graph."""
        return self.map(torch.Tensor.detach)

    def select(self, positions_P: torch.Tensor) -> "EdgeOutputs":
        """The outputs at int64 positions [P]."""
        return self.map(lambda value: value[positions_P.to(value.device)])

    @classmethod
    def of_edges(cls, per_edge: Iterable[torch.Tensor | None]) -> "EdgeOutputs":
        """Outputs from a head's values of edges, in the order of `EdgeValues` in `tree_kernels`."""
        return cls(**dict(zip((LOG_PROBS, ENTROPY, SUM_PI_SQUARED), per_edge, strict=True)))

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> "EdgeOutputs":
        """Outputs from a mapping; raises ValueError for an unknown name."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(named) - set(known))
        if unknown:
            raise ValueError(f"outputs: expected names among {', '.join(known)}, received {unknown[0]!r}")
        return cls(**named)


Metrics = Any
"""What a loss reports besides its value; a step passes it on unread."""

Loss = Callable[[EdgeOutputs, Sequence[int]], tuple[torch.Tensor, Metrics]]
"""Takes the outputs [f] of some rows, row after row, and their indices in the call; returns a scalar and metrics."""

PartsLoss = Callable[[EdgeOutputs], tuple[torch.Tensor, list[Metrics]]]
"""The loss of a micro-batch's rows, which may call the trainer's loss on parts of them: one entry of metrics each."""


def weighted_loss(loss: Loss, batch: MicroBatch, outputs: EdgeOutputs) -> tuple[torch.Tensor, list[Metrics]]:
    """The trainer's loss of a micro-batch from its outputs [f], with its path weights, if it has any.

    Row weights: rows of equal weight go through the loss together, and the result is scaled, which is right for any
    loss. Token weights scale the gradient of each output; the reported loss stays unweighted.
    """
    if batch.row_weight_B is None:
        if batch.edge_weight_F is not None:
            weight_F = torch.from_numpy(batch.edge_weight_F)
            outputs = outputs.map(lambda output: _ScaleGradient.apply(output, weight_F.to(output)))
        value, reported = loss(outputs, batch.rows)
        return value, [reported]
    losses, metrics = [], []
    for weight in np.unique(batch.row_weight_B):
        picked = np.flatnonzero(batch.row_weight_B == weight).tolist()
        part = outputs.select(torch.from_numpy(positions_of_rows(batch.offsets, picked)))
        value, reported = loss(part, [batch.rows[row] for row in picked])
        losses.append(float(weight) * value)
        metrics.append(reported)
    return torch.stack(losses).sum(), metrics


def with_one_draw(loss: PartsLoss) -> PartsLoss:
    """The loss of a micro-batch, which draws the same random numbers whenever it is called (verl's clip_cov draws the
    tokens that it clips)."""
    state = torch.get_rng_state()

    def of_rows(outputs: EdgeOutputs) -> tuple[torch.Tensor, list[Metrics]]:
        torch.set_rng_state(state)
        return loss(outputs)

    return of_rows


class _ScaleGradient(torch.autograd.Function):
    """Identity whose backward multiplies by a constant."""

    @staticmethod
    def forward(ctx: Any, values_F: torch.Tensor, weight_F: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight_F)
        return values_F.view_as(values_F)

    @staticmethod
    def backward(ctx: Any, gradient_F: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight_F,) = ctx.saved_tensors
        return gradient_F * weight_F.view(-1, *[1] * (gradient_F.dim() - 1)), None
