"""The rows' own loss as a function of outputs, for a forest that runs in one forward and for one in partitions.

A partitioned forest back-propagates dL/doutput of every slot, from the loss on leaf copies. A token-separable
loss needs the values of the partition at hand alone; the others need all values first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.loss.readout import Readout

Metrics = Any
"""What a loss reports beside its value; a step hands it through."""

Loss = Callable[[EdgeOutputs, Sequence[int]], tuple[torch.Tensor, Metrics]]
"""Function of outputs [f] of some rows, row after row, and the rows' indices in the call; it returns a scalar and
metrics."""

PartsLoss = Callable[[EdgeOutputs, Sequence[int]], tuple[torch.Tensor, list[Metrics]]]
"""The same with one entry of metrics for each part of the rows that went through the host's loss on its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsLoss:
    """The loss of one micro-batch as a function of slots."""

    loss: PartsLoss
    """The host's, weighted."""
    members: Sequence[int]
    """Indices of the micro-batch's rows in the call."""
    readout: Readout
    """Slots, and how rows see them."""

    def slot_gradients(self, slots: EdgeOutputs) -> EdgeOutputs:
        """dL/dvalue of every slot at the given values, without touching the model."""
        with torch.enable_grad():
            leaves = slots.map(lambda value: value.clone().requires_grad_())
            loss, _ = self.loss(self.readout.flat(leaves), self.members)
            named = leaves.present()
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
        return EdgeOutputs(**dict(zip(named, gradients, strict=True)))
