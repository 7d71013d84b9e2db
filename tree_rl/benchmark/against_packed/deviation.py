"""How far rounding drives the losses of trees and of packed rows apart.

Four replicas start from the same weights and see the same batches: trees, packed rows, packed rows last first, and
packed rows in higher precision. All keep their weights in the higher precision, so only gradients round.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tree_rl.benchmark.against_packed.random_model import YARDSTICK, in_higher_precision
from tree_rl.benchmark.against_packed.update import PACKED, Planner, log_probs
from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.comparison import TREE
from tree_rl.benchmark.results import Columns
from tree_rl.inspection.text import format_table

REORDERED, EXACT = "reordered", "exact"
"""Packed rows last first show how far the same kernels drift from themselves; the other is in higher precision."""
PAIRS = ((TREE, PACKED), (REORDERED, PACKED), (TREE, EXACT), (PACKED, EXACT))


class Replica:
    """One model and the weights in higher precision that its optimizer moves."""

    def __init__(self, model: Any, planner: Planner, *, lr: float) -> None:
        dtype = YARDSTICK.get(next(model.parameters()).dtype, torch.float64)
        self._model, self._planner = model, planner
        self._masters = [parameter.detach().to(dtype).requires_grad_() for parameter in model.parameters()]
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0.0)

    def step(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """One optimizer step on the mean negative log-prob of the trained tokens.

        Returns this loss before the step, and the gradient of all parameters as one float32 vector.
        """
        loss = 0.0
        for forward in self._planner(batch):
            is_trained_F = forward.advantages() != 0
            part = -(log_probs(self._model, forward) * is_trained_F).sum() / batch.num_trained
            part.backward()
            loss += part.item()
        weights = list(zip(self._masters, self._model.parameters(), strict=True))
        for master, parameter in weights:
            master.grad = parameter.grad.to(master.dtype)
        gradient = torch.cat([parameter.grad.flatten().float() for _, parameter in weights])
        self._optimizer.step()
        with torch.no_grad():
            for master, parameter in weights:
                parameter.copy_(master)
                parameter.grad = None
        return loss, gradient


def deviation_curves(
    model: Any, batches: Sequence[Batch], planners: Mapping[str, Planner], *, steps: int, lr: float
) -> Iterator[Columns]:
    """Train the replicas side by side; yield losses and relative differences of losses and gradients of each step.

    The batches are used in turns; no advantage may be 0.
    """
    replicas = {
        TREE: Replica(copy.deepcopy(model), planners[TREE], lr=lr),
        REORDERED: Replica(copy.deepcopy(model), lambda batch: planners[PACKED](batch.reversed()), lr=lr),
        PACKED: Replica(model, planners[PACKED], lr=lr),
        EXACT: Replica(in_higher_precision(model), planners[PACKED], lr=lr),
    }
    for step in range(steps):
        results = {name: replica.step(batches[step % len(batches)]) for name, replica in replicas.items()}
        row: Columns = {"step": step} | {f"loss_{name}": loss for name, (loss, _) in results.items()}
        row |= {f"loss_{name}_to_{other}": abs(results[name][0] / results[other][0] - 1) for name, other in PAIRS}
        for name, other in PAIRS:
            got, truth = results[name][1], results[other][1]
            row[f"gradient_{name}_to_{other}"] = float((got - truth).norm() / truth.norm())
        yield row


def format_curves(rows: Sequence[Columns]) -> str:
    """First, middle and last step, and the largest deviations."""
    names = [name for name in rows[0] if name.startswith(("loss_", "gradient_"))]
    shown = [rows[step] for step in sorted({0, len(rows) // 2, len(rows) - 1})]
    lines = [(str(row["step"]), *(f"{row[name]:.3g}" for name in names)) for row in shown]
    deviations = [name for name in names if "_to_" in name]
    largest = [f"largest {name}: {max(float(str(row[name])) for row in rows):.3g}" for name in deviations]
    return "\n".join([format_table(("step", *names), lines), *largest])
