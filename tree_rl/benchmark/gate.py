"""Nothing is timed before both sides have shown the same gradients: a float32 run of the rows is the yardstick."""

from dataclasses import dataclass
from typing import Any

import torch

from tree_rl.benchmark.batch import Batch
from tree_rl.benchmark.models import in_higher_precision
from tree_rl.benchmark.update import Planner, clipped_loss, log_probs

NOISE = 1.1
"""Two runs that round alike differ this much in their error at most; the tree may be no further off than that."""
FLOAT32_LIMIT = 1e-5
"""Relative error of a float32 gradient that counts as rounding, whatever the packed rows reach."""


class GateError(RuntimeError):
    """The tree's gradient is further from the yardstick than the packed rows' gradient: no time would mean anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """Relative norms of the errors of both gradients, over all parameters."""

    tree: float
    packed: float

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        return max(NOISE * self.packed, FLOAT32_LIMIT)


def check_gradients(model: Any, batch: Batch, tree: Planner, packed: Planner) -> Gradients:
    """Compare the gradients of one batch with those of the packed rows in higher precision.

    Args:
        model: from `build_model`; its gradients are cleared.
        batch: small: a copy of the model in higher precision must fit beside it.
        tree: plans trees.
        packed: plans packed rows.

    Returns:
        Both errors.

    Raises:
        GateError: the tree is further off than the packed rows.
    """
    truth = _gradients(in_higher_precision(model), batch, packed)
    errors = Gradients(
        tree=_relative_error(_gradients(model, batch, tree), truth),
        packed=_relative_error(_gradients(model, batch, packed), truth),
    )
    model.zero_grad()
    if not errors.tree <= errors.limit:
        raise GateError(
            f"gradient of the tree: expected a relative error of at most {errors.limit:.3g}, received "
            f"{errors.tree:.3g} (packed rows: {errors.packed:.3g}); try another --tree-attention, and report it with "
            "the output of tree-rl doctor"
        )
    return errors


def _gradients(model: Any, batch: Batch, planner: Planner) -> list[torch.Tensor]:
    model.zero_grad()
    for forward in planner(batch):
        log_probs_F = log_probs(model, forward)
        clipped_loss(log_probs_F, log_probs_F.detach(), forward.advantage_F, batch.num_trained).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return gradients


def _relative_error(got: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    difference = torch.stack([(g.to(t.dtype) - t).square().sum() for g, t in zip(got, truth, strict=True)]).sum()
    return float((difference / torch.stack([t.square().sum() for t in truth]).sum()).sqrt())
