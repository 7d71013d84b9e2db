"""One forest, or the same rows packed, through the model under verl's mixed precision and through verl's loss."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.training.tree_step import TreeInputs
from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin.compat import detach_tree, get_device_id, get_device_name
from tree_rl.verl_plugin.engine.routing import TreeRoutingEngine
from tree_rl.verl_plugin.engine.rows import Rows

LossFunction = Callable[..., tuple[torch.Tensor, dict[str, Any]]]


class TreeForwardEngine(TreeRoutingEngine):
    """Runs single forwards; which outputs the rows' loss reads is its subclass's business (`tree_forward`)."""

    @property
    def loss_scale(self) -> float:
        """Factor on the loss in float16 training, 1 elsewhere."""
        return 1.0 if self.scaler is None else float(self.scaler.scale(torch.ones((), device=get_device_name())))

    def forward_module(self, **model_kwargs: Any) -> Any:
        """The module under verl's mixed precision."""
        with self.autocast():
            return self.module(**model_kwargs)

    def tree_step(
        self,
        selected: TensorDict,
        rows: Rows,
        members: list[int],
        forest: Forest,
        loss_function: LossFunction | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """One forest through the model and its rows through verl's loss.

        Args:
            selected: the rows of the micro-batch, in its order.
            rows: all rows of the call.
            members: the selected rows' indices in it.
            forest: the forest of the selected rows.
            loss_function: verl's loss, or None for inference.

        Returns:
            The loss to differentiate, and verl's output dict of the micro-batch.
        """
        selected = selected.to(get_device_id())
        metrics: dict[str, Any] = {}
        routing = self.open_routing(forest, rows, members)
        trace = None if routing is None else routing.open()
        inputs = TreeInputs.from_forest(forest, get_device_id(), router_trace=trace)
        with self.autocast():
            model_output = self.tree_forward(selected, rows, members, forest, inputs)
            if loss_function is None:
                loss = torch.tensor(1.0, device=get_device_name())
            else:
                loss, metrics = loss_function(
                    model_output=model_output, data=selected, dp_group=self.get_data_parallel_group()
                )
        output = {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}
        if routing is None:
            return loss, output
        assert trace is not None
        share = routing.close(trace)
        self.close_routing(routing, selected, members, output, loss_function is None)
        return loss if share is None else loss + share, output

    def stock_step(
        self, selected: TensorDict, loss_function: LossFunction | None = None, forward_only: bool = True
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The same rows through stock verl's forward, packed, without a tree."""
        return super().forward_step(selected, loss_function, forward_only)

    def idle_step(self) -> torch.Tensor:
        """The smallest forward that keeps FSDP's collectives in step on a rank that has fewer micro-batches."""
        forest = Forest.from_rows([[0]])
        inputs = TreeInputs.from_forest(forest, get_device_id())
        return (self.forward_module(**inputs.model_kwargs()).logits * 0).sum().float()

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of the forward: mixed precision's parameter dtype."""
        return self._autocast_dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision as stock verl enters it: none in float32."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)

    def nested(self, values_F: torch.Tensor, selected: TensorDict) -> torch.Tensor:
        """Flat values as verl's nested tensor over full rows."""
        return torch.nested.nested_tensor_from_jagged(values_F, selected["input_ids"].offsets())
