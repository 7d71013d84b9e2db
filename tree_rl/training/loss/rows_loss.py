"""The rows' loss as a function of outputs, and optional path weights around it.

With path weights w_k a unique token weighs lambda_t (paper, "Derivation").
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.tree.forest.jagged import positions_of_rows

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
