"""Loss and gradient of the same training run over trees and over packed rows: how far rounding drives them apart.

Four replicas start from the same weights and see the same batches: trees, packed rows, packed rows last first, which
differ by rounding alone, and packed rows in higher precision as the yardstick. Weights are kept in the yardstick's
precision, so only gradients round.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.compare import PACKED, TREE
from tree_rl.benchmark.models import YARDSTICK, in_higher_precision
from tree_rl.benchmark.update import Planner, log_probs

REORDERED = "reordered"
"""Packed rows, last first: how far the same kernels drift from themselves."""
EXACT = "exact"
"""The replica in higher precision."""
PAIRS = ((TREE, PACKED), (REORDERED, PACKED), (TREE, EXACT), (PACKED, EXACT))


@dataclass(kw_only=True, slots=True)
class Replica:
    """One model and the master weights that its optimizer moves."""

    model: Any
    planner: Planner
    masters: list[torch.Tensor]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, model: Any, planner: Planner, *, lr: float) -> "Replica":
        """Give a model master weights in the yardstick's precision."""
        dtype = YARDSTICK.get(next(model.parameters()).dtype, torch.float64)
        masters = [parameter.detach().to(dtype).requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=lr, weight_decay=0.0)
        return cls(model=model, planner=planner, masters=masters, optimizer=optimizer)

    def step(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """One optimizer step on the mean negative log-prob of the trained tokens.

        Returns:
            The loss before the step, and the gradient of all parameters as one float32 vector.
        """
        loss = 0.0
        for forward in self.planner(batch):
            is_trained_F = forward.advantages() != 0
            part = -(log_probs(self.model, forward) * is_trained_F).sum() / batch.num_trained
            part.backward()
            loss += part.item()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.to(master.dtype)
        gradient = torch.cat([parameter.grad.flatten().float() for parameter in self.model.parameters()])
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
        return loss, gradient


def deviation_curves(
    model: Any, batches: Sequence[Batch], planners: dict[str, Planner], *, steps: int, lr: float
) -> Iterator[dict[str, object]]:
    """Train the replicas side by side.

    Args:
        model: the initial weights.
        batches: used in turns; no advantage may be 0.
        planners: of trees and packed rows.
        steps: optimizer steps.
        lr: of AdamW.

    Yields:
        The columns of each step: losses, and relative differences of losses and gradients.
    """
    replicas = {
        TREE: Replica.of(copy.deepcopy(model), planners[TREE], lr=lr),
        REORDERED: Replica.of(copy.deepcopy(model), lambda batch: planners[PACKED](batch.reversed()), lr=lr),
        PACKED: Replica.of(model, planners[PACKED], lr=lr),
        EXACT: Replica.of(in_higher_precision(model), planners[PACKED], lr=lr),
    }
    for step in range(steps):
        results = {name: replica.step(batches[step % len(batches)]) for name, replica in replicas.items()}
        losses = {name: loss for name, (loss, _) in results.items()}
        gradients = {name: gradient for name, (_, gradient) in results.items()}
        yield {
            "step": step,
            **{f"loss_{name}": loss for name, loss in losses.items()},
            **{f"loss_{name}_to_{other}": abs(losses[name] / losses[other] - 1) for name, other in PAIRS},
            **{f"gradient_{name}_to_{other}": _relative(gradients[name], gradients[other]) for name, other in PAIRS},
        }


def _relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).norm() / truth.norm())
