"""A forest larger than memory, partition by partition: every token forward once and backward once.

Parent before child, a child's backward before its parent's; one `autograd.backward` per partition over its loss and
the keys and values it relayed (paper, section "Redundancy-Free Tree Partitioning").
Legend: N unique tokens, n those of a partition; E slots that the rows' loss reads, e those of a partition; f flat
tokens of the forest's rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_rl.models.images import TokensWithImages
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.cuts.cut_relay import CutRelay
from tree_rl.training.cuts.path_stack import PathStack
from tree_rl.training.hand_overs import MicroBatchResult, Work
from tree_rl.training.loss.edges import edges_of_batch
from tree_rl.training.loss.outputs import VALUES, EdgeOutputs, weighted_loss, with_one_draw
from tree_rl.training.loss.readout import EdgeReadout, Readout, ValueReadout
from tree_rl.training.memory.offloaded_inputs import OffloadedInputs
from tree_rl.training.micro_batch import MicroBatch, live_tokens
from tree_rl.training.ranks.lock_step import BACKWARD, FORWARD, TOWER_BACKWARD, TOWER_FORWARD
from tree_rl.training.routers.call_routers import close_routing, open_routing
from tree_rl.training.routers.expert_load import ExpertLoad
from tree_rl.training.routers.forest_routing import ForestRouting
from tree_rl.training.tower import Tower
from tree_rl.tree.partition import PartitionPlan

SlotGradients = Callable[[EdgeOutputs], EdgeOutputs]
"""Takes the values of all slots known so far and returns dL/dvalue of each slot."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartitionedRun:
    """Runs one forest in the partitions of its plan; yields before each op, so that ranks can run in lock-step."""

    context: StepContext
    batch: MicroBatch
    """The forest, its plan, and what is kept in host memory."""
    readout: Readout
    """Reads what the loss needs from each partition."""
    routing: ForestRouting | None = None
    """Prescribed and recorded routes of the forest; None without Mixture-of-Experts routers."""
    images: TokensWithImages | None = None
    """Features and positions of the forest's tokens; None for rows of text."""

    @property
    def plan(self) -> PartitionPlan:
        """The plan of the forest."""
        assert self.batch.plan is not None
        return self.batch.plan

    def infer(self) -> Iterator[str]:
        """Compute the values of all slots without gradients and store them in `readout`; yields before each op."""
        stack = self._open_stack()
        waiting: dict[int, CutRelay] = {}
        for kind, number in self.plan.ops:
            if kind == "backward":
                waiting.pop(number)
                continue
            yield FORWARD
            # One context per op: a generator suspended inside it would leave gradients off for its caller.
            with torch.no_grad():
                waiting[number], outputs, _ = self._forward(number, waiting, stack)
            self.readout.store(number, outputs)

    def train(self, slot_gradients: SlotGradients, *, scale: float = 1.0) -> Iterator[str]:
        """Forward and backward of all partitions; yields before each op.

        Args:
            slot_gradients: called once per partition, after its values are known. Values of other partitions may be
                missing or stale, which does not matter to a token-separable loss.
            scale: factor on the loss, for a gradient scaler.
        """
        stack, layer_inputs = self._open_stack(), offloaded_inputs(self.context, self.batch)
        live: dict[int, tuple[CutRelay, torch.Tensor]] = {}
        for kind, number in self.plan.ops:
            partition = self.plan.partitions[number]
            if kind == "forward":
                yield FORWARD
                with layer_inputs.of_forward():
                    relays = {p: pair[0] for p, pair in live.items()}
                    relay, outputs, anchor = self._forward(number, relays, stack)
                self.readout.store(number, outputs)
                surrogate = self.readout.surrogate(number, outputs, slot_gradients(self.readout.values)) + anchor
                live[number] = (relay, surrogate * scale)
            else:
                yield BACKWARD
                relay, loss = live.pop(number)
                upward = relay.backward(loss)
                if partition.parent >= 0:
                    live[partition.parent][0].receive(upward, partition)

    def _forward(
        self, number: int, live: dict[int, CutRelay], stack: PathStack
    ) -> tuple[CutRelay, EdgeOutputs, torch.Tensor]:
        """The relay, outputs [e], and a scalar that joins the loss: the anchor plus the router auxiliary loss."""
        partition, forest = self.plan.partitions[number], self.batch.forest
        assert forest is not None
        past = live[partition.parent].past_of_child(partition) if partition.parent >= 0 else []
        relay = CutRelay(stack, past, partition)
        tokens = None if self.routing is None else to_device(partition.tokens.astype(np.int64), self.context.device)
        trace = None if self.routing is None else self.routing.open(tokens)
        inputs = TreeInputs.from_forest(
            forest,
            self.context.device,
            partition=partition,
            router_trace=trace,
            relay=relay.layers,
            tile_tokens=self.batch.saving.tile_tokens,
            ranks=self.context.ranks,
            images=self.images,
        )
        outputs, anchor = self.readout.read(self.context.forward, inputs, number)
        relay.close()
        if self.routing is not None and trace is not None:
            share = self.routing.close(trace, tokens)
            anchor = anchor if share is None else anchor + share
        return relay, outputs, anchor

    def _open_stack(self) -> PathStack:
        longest = max((partition.past_length for partition in self.plan.partitions), default=0)
        return PathStack(longest, self.context.device, on_host=self.batch.saving.relays_on_host)


def training_ops(plan: PartitionPlan) -> str:
    """Ops of `PartitionedRun.train`, in order."""
    return "".join(FORWARD if kind == "forward" else BACKWARD for kind, _ in plan.ops)


def takes_preview(call: StepCall, *, is_known: bool) -> bool:
    """True if the loss couples tokens whose values are not known, so that a pass without gradients comes first."""
    return call.trains and not call.is_separable and not is_known


def run_partitioned(
    context: StepContext,
    call: StepCall,
    batch: MicroBatch,
    load: ExpertLoad | None,
    *,
    known_f: torch.Tensor | None,
) -> Work:
    """Run a forest partition by partition.

    `known_f` [f] are the log-probs of its rows under the current weights, if they are known.
    """
    readout = _readout(context, call, batch)
    routing = open_routing(context, call, batch, load)
    tower = None if batch.images is None else Tower(context, batch.images)
    if tower is not None:
        yield TOWER_FORWARD
        tower.forward()
    images = None if tower is None else tower.tokens()
    run = PartitionedRun(context=context, batch=batch, readout=readout, routing=routing, images=images)
    loss = None if call.loss is None else with_one_draw(partial(weighted_loss, call.loss, batch))
    if call.trains:
        assert loss is not None
        if known_f is not None:
            readout.preset_log_probs(known_f)
        if takes_preview(call, is_known=known_f is not None):
            yield from run.infer()
        yield from run.train(partial(readout.gradients, loss), scale=context.loss_scale())
        if tower is not None:
            yield TOWER_BACKWARD
            tower.backward()
    else:
        yield from run.infer()
    with torch.no_grad():
        outputs = readout.flat(readout.values)
        value, metrics = (torch.tensor(1.0), []) if loss is None else loss(outputs)
    routes_fLK = None if routing is None else close_routing(context, call, batch, load, routing)
    return MicroBatchResult(outputs=outputs.detach(), loss=value.item(), metrics=metrics, routes_fLK=routes_fLK)


def offloaded_inputs(context: StepContext, batch: MicroBatch) -> OffloadedInputs:
    """Host memory for the layer inputs of an update."""
    tokens = live_tokens([batch])
    ranks = context.ranks
    if ranks is not None:
        # Each forward is padded separately.
        tokens = ranks.own_tokens(tokens) + batch.num_partitions
    return OffloadedInputs(context.module, layers=batch.saving.offloaded_layers, live_tokens=tokens)


def _readout(context: StepContext, call: StepCall, batch: MicroBatch) -> Readout:
    assert batch.forest is not None and batch.plan is not None
    if VALUES in call.outputs:
        return ValueReadout(batch.forest, batch.plan, device=context.device)
    edges = edges_of_batch(call.rows, batch, context.device)
    return EdgeReadout(batch.plan, edges, names=call.outputs, device=context.device, ranks=context.ranks)
