"""One micro-batch as work for the lock-step loop: rows without a tree, a whole forest, or a forest in partitions.

Legend: f flat tokens of a micro-batch, L decoder layers, K experts per token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.loss.edges import EdgePlan, plan_edges
from tree_rl.training.loss.outputs import LOG_PROBS, VALUES, EdgeOutputs, beside_log_probs
from tree_rl.training.loss.path_weighting import weigh
from tree_rl.training.loss.readout import EdgeReadout, Readout, ValueReadout
from tree_rl.training.loss.rows_loss import Metrics, RowsLoss
from tree_rl.training.memory.offloaded_inputs import OffloadedInputs
from tree_rl.training.partitioned import PartitionedRun, inference_ops, training_ops
from tree_rl.training.planning.micro_batches import MicroBatch
from tree_rl.training.ranks.lock_step import BACKWARD, FORWARD
from tree_rl.training.routers.call_routers import CallRouters
from tree_rl.training.whole import tree_log_probs, tree_values
from tree_rl.tree.forest import Forest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatchResult:
    """What a micro-batch gives its host."""

    outputs: EdgeOutputs
    """[f], row after row, without graph."""
    loss: float
    """Of its rows; 1 where no loss was asked for."""
    metrics: list[Metrics]
    """One entry for each part of the rows that went through the host's loss."""
    routes_fLK: torch.Tensor | None = None
    """int16, experts that ran; None where the call did not record them."""


class MicroBatchRun(Protocol):
    """A micro-batch that runs op by op."""

    ops: str
    """Its forwards and backwards, in order."""
    result: MicroBatchResult | None
    """Set once the work is done."""

    def work(self) -> Iterator[str]:
        """Run; yields the kind of each op before it runs."""


class FlatBatchRun:
    """Rows that run without a tree, through the host's own forward and loss."""

    def __init__(self, context: StepContext, call: StepCall, batch: MicroBatch) -> None:
        """Bind a micro-batch without a forest."""
        self._context, self._call, self._batch = context, call, batch
        self.ops = FORWARD + BACKWARD if call.trains else FORWARD
        self.result: MicroBatchResult | None = None

    def work(self) -> Iterator[str]:
        """See `MicroBatchRun.work`."""
        yield FORWARD
        run_rows = self._call.flat_rows
        assert run_rows is not None
        loss = None if self._call.loss is None else weigh(self._call.loss, self._batch)
        value, outputs, metrics = run_rows(self._batch.rows, loss)
        self.result = MicroBatchResult(outputs=outputs, loss=value.detach().item(), metrics=metrics or [])
        if self._call.trains:
            yield BACKWARD
            (value * self._context.loss_scale()).backward()


class WholeBatchRun:
    """A forest that runs in one forward."""

    def __init__(self, context: StepContext, call: StepCall, batch: MicroBatch, routers: CallRouters) -> None:
        """Bind a micro-batch with a forest and no plan."""
        self._context, self._call, self._batch, self._routers = context, call, batch, routers
        self.ops = FORWARD + BACKWARD if call.trains else FORWARD
        self.result: MicroBatchResult | None = None

    def work(self) -> Iterator[str]:
        """See `MicroBatchRun.work`."""
        yield FORWARD
        context, call, batch = self._context, self._call, self._batch
        assert batch.forest is not None
        routing = self._routers.open(call, batch, context.device)
        trace = None if routing is None else routing.open()
        offloaded = _offloaded_inputs(context, call, batch)
        with context.autocast(), offloaded.of_forward():
            inputs = TreeInputs.from_forest(
                batch.forest,
                context.device,
                router_trace=trace,
                tile_tokens=batch.measures.tile_tokens,
                ranks=context.ranks,
            )
            outputs = _outputs(context, call, batch.rows, batch.forest, inputs)
            value = torch.tensor(1.0, device=context.device)
            metrics: list[Metrics] = []
            if call.loss is not None:
                value, metrics = weigh(call.loss, batch)(outputs, batch.rows)
        reported = value.detach().item()
        if routing is not None and trace is not None:
            share = routing.close(trace)
            value = value if share is None else value + share
        routes_fLK = self._routers.close(routing, call, batch)
        self.result = MicroBatchResult(outputs=outputs.detach(), loss=reported, metrics=metrics, routes_fLK=routes_fLK)
        if call.trains:
            yield BACKWARD
            (value * context.loss_scale()).backward()


class PartitionedBatchRun:
    """A forest beyond the budget, which runs partition by partition."""

    def __init__(
        self,
        context: StepContext,
        call: StepCall,
        batch: MicroBatch,
        routers: CallRouters,
        *,
        known_F: torch.Tensor | None,
    ) -> None:
        """Bind a micro-batch with a plan.

        Args:
            context: the model and its host.
            call: what is asked.
            batch: the forest and its plan.
            routers: what they do.
            known_F: [f], log-probs of its rows under the present weights, where they are known.
        """
        assert batch.plan is not None
        self._context, self._call, self._batch, self._routers = context, call, batch, routers
        self._known_F = known_F
        self._previews = call.trains and not call.is_separable and known_F is None
        forwards = inference_ops(batch.plan)
        preview = forwards if self._previews else ""
        self.ops = preview + training_ops(batch.plan) if call.trains else forwards
        self.result: MicroBatchResult | None = None
        self.run: PartitionedRun | None = None

    def work(self) -> Iterator[str]:
        """See `MicroBatchRun.work`."""
        context, call, batch = self._context, self._call, self._batch
        assert batch.forest is not None and batch.plan is not None
        readout = _readout(context, call, batch)
        routing = self._routers.open(call, batch, context.device)
        self.run = PartitionedRun(
            context.forward,
            batch.forest,
            batch.plan,
            readout,
            routing=routing,
            offload=batch.measures.relays_on_host,
            inputs=_offloaded_inputs(context, call, batch),
            tile_tokens=batch.measures.tile_tokens,
            ranks=context.ranks,
        )
        loss = None if call.loss is None else weigh(call.loss, batch)
        if call.trains:
            assert loss is not None
            if self._known_F is not None:
                readout.preset(LOG_PROBS, self._known_F)
            if self._previews:
                yield from self.run.infer(preview=True)
            rows_loss = RowsLoss(loss=loss, members=batch.rows, readout=readout)
            yield from self.run.train(rows_loss.slot_gradients, scale=context.loss_scale())
        else:
            yield from self.run.infer()
        with torch.no_grad():
            outputs = readout.flat(readout.values)
            value, metrics = (torch.tensor(1.0), []) if loss is None else loss(outputs, batch.rows)
        routes_fLK = self._routers.close(routing, call, batch)
        self.result = MicroBatchResult(
            outputs=outputs.detach(), loss=value.item(), metrics=metrics, routes_fLK=routes_fLK
        )


def _offloaded_inputs(context: StepContext, call: StepCall, batch: MicroBatch) -> OffloadedInputs:
    """Where layer inputs wait for the backward."""
    live_tokens = batch.unique_tokens if batch.plan is None else batch.plan.peak_live_tokens
    ranks = context.ranks
    if ranks is not None:
        # Each forward is padded for itself.
        live_tokens = ranks.own_tokens(live_tokens) + batch.num_partitions
    layers = batch.measures.offloaded_layers if call.trains else 0
    return OffloadedInputs(context.module, layers=layers, live_tokens=live_tokens)


def run_forest(
    context: StepContext, call: StepCall, members: Sequence[int], forest: Forest, *, ranks: SequenceParallel | None
) -> EdgeOutputs:
    """One forward of a forest of the given rows; outputs [f], with graph where gradients are on.

    Args:
        context: the model and its host.
        call: what is asked.
        members: the forest's rows in the call.
        forest: of these rows.
        ranks: share its tokens; None: this rank runs all of it.
    """
    with context.autocast():
        return _outputs(context, call, members, forest, TreeInputs.from_forest(forest, context.device, ranks=ranks))


def _outputs(
    context: StepContext, call: StepCall, members: Sequence[int], forest: Forest, inputs: TreeInputs
) -> EdgeOutputs:
    if VALUES in call.outputs:
        return tree_values(context.module, forest, inputs)
    edges = partial(_edges, context, call, members, forest, ranks=inputs.ranks)
    return tree_log_probs(context.module, inputs, edges, extras=beside_log_probs(call.outputs))


def _edges(
    context: StepContext,
    call: StepCall,
    members: Sequence[int],
    forest: Forest,
    *,
    ranks: SequenceParallel | None = None,
) -> EdgePlan:
    wanted_F = call.rows.wanted_F[call.rows.flat_positions(members)]
    return plan_edges(forest, wanted_F, call.rows.temperature_B[list(members)], context.device, ranks=ranks)


def _readout(context: StepContext, call: StepCall, batch: MicroBatch) -> Readout:
    assert batch.forest is not None and batch.plan is not None
    if VALUES in call.outputs:
        return ValueReadout(batch.forest, batch.plan, device=context.device)
    edges = _edges(context, call, batch.rows, batch.forest)
    return EdgeReadout(batch.plan, edges, names=call.outputs, device=context.device, ranks=context.ranks)
