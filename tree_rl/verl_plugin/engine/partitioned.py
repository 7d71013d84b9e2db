"""verl's loss over a forest that runs in partitions: dL/dlog-prob of every edge, from verl's own loss on leaf copies.

A token-separable loss needs only the values of the partition at hand; the rest read all values first, from the last
inference if the weights have not moved since, else from one extra pass without gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.training.readout import Readout, SlotValues
from tree_rl.verl_plugin.compat import detach_tree, ppo_loss, sft_loss, value_loss
from tree_rl.verl_plugin.engine.path_weighting import unweighted

SEPARABLE_POLICY_LOSSES = frozenset({"vanilla", "dppo_tv", "dppo_kl", "gpg", "dro", "cispo", "sapo"})
"""verl's policy losses in which a token's gradient depends on no other token's log-prob."""


def is_token_separable(loss_function: Any) -> bool:
    """Whether dL/dlog-prob of a token can be had from that token's log-prob alone; False for a loss we do not know."""
    loss_function = unweighted(loss_function)
    if not isinstance(loss_function, partial):
        return False
    if loss_function.func is ppo_loss:
        return loss_function.keywords["config"].policy_loss.get("loss_mode", "vanilla") in SEPARABLE_POLICY_LOSSES
    return loss_function.func in (sft_loss, value_loss)


class RowsLoss:
    """verl's loss of one micro-batch's rows as a function of slots."""

    def __init__(self, readout: Readout, selected: TensorDict, loss_function: Callable[..., Any] | None) -> None:
        """Bind slots to the rows that read them.

        Args:
            readout: slots and how rows see them.
            selected: the rows, on the device.
            loss_function: called with model_output and data; None in inference.
        """
        self.readout = readout
        self.selected = selected
        self.loss_function = loss_function

    def slot_gradients(self, values: SlotValues) -> SlotValues:
        """dL/dvalue of every slot at the given values, without touching the model."""
        assert self.loss_function is not None
        with torch.enable_grad():
            leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
            loss, _ = self.loss_function(model_output=self._model_output(leaves), data=self.selected)
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))

    def output(self) -> dict[str, Any]:
        """verl's output dict of the micro-batch, once the values of all slots are known."""
        metrics: dict[str, Any] = {}
        with torch.no_grad():
            model_output = self._model_output(self.readout.values)
            loss = torch.tensor(1.0)
            if self.loss_function is not None:
                loss, metrics = self.loss_function(model_output=model_output, data=self.selected)
        return {"model_output": detach_tree(model_output), "loss": loss.item(), "metrics": metrics}

    def _model_output(self, values: SlotValues) -> dict[str, torch.Tensor]:
        offsets = self.selected["input_ids"].offsets()
        flat = self.readout.flat(values)
        return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in flat.items()}
