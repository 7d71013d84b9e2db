"""One micro-batch as work for the lock-step loop: its ops, the generator that runs them, and what it gives verl."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from tree_rl.training.partitioned_step import PartitionedRun, inference_ops, training_ops
from tree_rl.training.routing import RoutedReadout
from tree_rl.training.schedule import BACKWARD, FORWARD
from tree_rl.verl_plugin.compat import get_device_id
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.micro_batches import MicroBatch
from tree_rl.verl_plugin.engine.partitioned import RowsLoss, is_token_separable
from tree_rl.verl_plugin.engine.path_weighting import weigh
from tree_rl.verl_plugin.engine.rows import Rows


class Step(Protocol):
    """A micro-batch that runs op by op."""

    ops: str
    """Its forwards and backwards, in order."""
    output: dict[str, Any]
    """verl's output dict, once the work is done."""

    def work(self) -> Iterator[str]:
        """Run; yields the kind of each op before it runs."""


class WholeStep:
    """A micro-batch that runs in one forward: a forest, or rows through stock verl."""

    def __init__(
        self, engine: Any, micro_batch: MicroBatch, data: TensorDict, rows: Rows, loss: Any, forward_only: bool
    ) -> None:
        """Bind a micro-batch without a plan to its engine and verl's loss."""
        self.engine, self.micro_batch, self.data, self.rows = engine, micro_batch, data, rows
        self.loss = None if loss is None else weigh(loss, micro_batch)
        self.forward_only = forward_only
        self.ops = FORWARD if forward_only else FORWARD + BACKWARD
        self.output: dict[str, Any] = {}

    def work(self) -> Iterator[str]:
        """See `Step.work`."""
        yield FORWARD
        members = list(self.micro_batch.rows)
        selected = selected_rows(self.data, members)
        if self.micro_batch.forest is None:
            loss, self.output = self.engine.stock_step(selected, self.loss, self.forward_only)
        else:
            loss, self.output = self.engine.tree_step(selected, self.rows, members, self.micro_batch.forest, self.loss)
        if not self.forward_only:
            yield BACKWARD
            (loss * self.engine.loss_scale).backward()


class PartitionedStep:
    """A micro-batch whose forest is beyond the budget and runs partition by partition."""

    def __init__(
        self, engine: Any, micro_batch: MicroBatch, data: TensorDict, rows: Rows, loss: Any, forward_only: bool
    ) -> None:
        """Bind a micro-batch with a plan to its engine and verl's loss; looks up values that are known already."""
        assert micro_batch.plan is not None and micro_batch.forest is not None
        self.engine, self.micro_batch, self.data, self.rows = engine, micro_batch, data, rows
        self.loss = None if loss is None else weigh(loss, micro_batch)
        self.forward_only = forward_only
        coupled = not forward_only and not is_token_separable(self.loss)
        known = engine.memory.recall(rows, micro_batch.rows) if coupled else None
        self.known_F = None if known is None else torch.cat(known)
        self.previews = coupled and known is None
        forwards = inference_ops(micro_batch.plan)
        preview = forwards if self.previews else ""
        self.ops = forwards if forward_only else preview + training_ops(micro_batch.plan)
        self.output: dict[str, Any] = {}
        self.run: PartitionedRun | None = None

    def work(self) -> Iterator[str]:
        """See `Step.work`."""
        forest, plan, members = self.micro_batch.forest, self.micro_batch.plan, list(self.micro_batch.rows)
        assert forest is not None and plan is not None
        selected = selected_rows(self.data, members).to(get_device_id())
        readout = self.engine.readout(selected, self.rows, members, forest, plan)
        routing = self.engine.open_routing(forest, self.rows, members)
        if routing is not None:
            readout = RoutedReadout(readout, routing, plan)
        group = self.engine.get_data_parallel_group()
        loss = None if self.loss is None else partial(self.loss, dp_group=group)
        rows_loss = RowsLoss(readout, selected, loss)
        offload = self.engine.tree_config.offload
        self.run = PartitionedRun(self.engine.forward_module, forest, plan, readout, offload=offload)
        if self.forward_only:
            yield from self.run.infer()
        else:
            if self.known_F is not None:
                readout.preset("log_probs", self.known_F)
            if self.previews:
                yield from self.run.infer(preview=True)
            yield from self.run.train(rows_loss.slot_gradients, scale=self.engine.loss_scale)
        self.output = rows_loss.output()
        if routing is not None:
            self.engine.close_routing(routing, selected, members, self.output, self.forward_only)


def selected_rows(data: TensorDict, members: list[int]) -> TensorDict:
    """The rows of a micro-batch; all rows in their order are not copied."""
    if members == list(range(len(data))):
        return data.copy()
    return tu.index_select_tensor_dict(data, members)


def make_step(
    engine: Any, micro_batch: MicroBatch, data: TensorDict, rows: Rows, loss: Any, forward_only: bool
) -> Step:
    """The step of a micro-batch: partitioned where it has a plan."""
    kind = WholeStep if micro_batch.plan is None else PartitionedStep
    return kind(engine, micro_batch, data, rows, loss, forward_only)
