"""The rows' loss as a function of outputs.

For a partitioned forest the loss runs on leaf copies of the outputs and gives dL/doutput of every slot, which the
partitions back-propagate. A token-separable loss needs only the current partition's values; others need all values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tree_rl.training.loss.outputs import EdgeOutputs
from tree_rl.training.loss.readout import Readout

Metrics = Any
"""What a loss reports besides its value; a step passes it on unread."""

Loss = Callable[[EdgeOutputs, Sequence[int]], tuple[torch.Tensor, Metrics]]
"""Takes the outputs [f] of some rows, row after row, and their indices in the call; returns a scalar and metrics."""

PartsLoss = Callable[[EdgeOutputs, Sequence[int]], tuple[torch.Tensor, list[Metrics]]]
"""A loss that may split the rows into parts and call the trainer's loss on each; one entry of metrics per part."""


def slot_gradients(loss: PartsLoss, members: Sequence[int], readout: Readout, slots: EdgeOutputs) -> EdgeOutputs:
    """dL/dvalue of every slot at the given values; does not run the model.

    Args:
        loss: the trainer's loss with path weights.
        members: indices of the micro-batch's rows in the call.
        readout: scatters the slots to these rows.
        slots: values [E].
    """
    with torch.enable_grad():
        leaves = slots.map(lambda value: value.clone().requires_grad_())
        value, _ = loss(readout.flat(leaves), members)
        named = leaves.present()
        gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True, materialize_grads=True)
    return EdgeOutputs(**dict(zip(named, gradients, strict=True)))
