"""After a CUDA out-of-memory error on any rank: catch up, agree on a smaller budget, run the call again.

The other ranks wait in a collective of the failed op. The failed rank follows the schedule to its end with one token
per op. Sequence-parallel ranks wait in exchanges as well; they have the same plan, so the failed rank knows the sizes
of all remaining exchanges. The values it sends are meaningless.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.hand_overs import PlanRun, StepPlan
from tree_rl.training.loss.edge_share import EdgeShare
from tree_rl.training.loss.edges import edges_of_batch, plan_edges, tree_log_probs, tree_values
from tree_rl.training.loss.outputs import VALUES
from tree_rl.training.memory_budget import MemoryBudget
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.partitioned import takes_preview, training_ops
from tree_rl.training.ranks.lock_step import BACKWARD, FORWARD
from tree_rl.training.run import Runner
from tree_rl.tree.forest import Forest

logger = logging.getLogger(__name__)


class Repeat:
    """Agrees with all ranks whether a call runs again."""

    def __init__(self, context: StepContext, budget: MemoryBudget, runner: Runner) -> None:
        self._context, self._budget, self._runner = context, budget, runner

    def settle(self, plan: StepPlan, ran: PlanRun | None) -> PlanRun | None:
        """Return `ran`, or None if any rank ran out of memory and all have agreed on a smaller budget.

        Args:
            plan: a plan that may be repeated; all ranks call this.
            ran: what this rank ran; None if it ran out of memory.
        """
        if ran is None:
            self._catch_up(plan)
        tokens = self._budget.shrink_after(ran is None, plan.batches, plan.max_tokens)
        if tokens is None:
            return ran
        logger.warning(
            "CUDA ran out of memory%s; all ranks repeat the step with tree.max_tokens=%d",
            " on this rank" if ran is None else " on another rank",
            tokens,
        )
        return None

    def _catch_up(self, plan: StepPlan) -> None:
        """Issue the remaining collectives of the call, for which the other ranks wait."""
        context, call = self._context, plan.call
        for counter in context.counters:
            counter.restart()
        torch.cuda.empty_cache()
        if context.num_ranks > 1 and (context.collectives is not None or context.ranks is not None):
            self._runner.follow(plan, stand_in_work(context, call, _sizes(context, plan)))
        for counter in context.counters:
            counter.start()


def _sizes(context: StepContext, plan: StepPlan) -> list["OpSize"]:
    """Sizes of this rank's ops under sequence parallelism; without it none are needed."""
    ranks = context.ranks
    if ranks is None:
        return []
    pairs = zip(plan.batches, plan.known, strict=True)
    return [size for batch, known in pairs for size in op_sizes(plan.call, batch, ranks, is_known=known is not None)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSize:
    """One forward or backward of a micro-batch."""

    kind: str
    """FORWARD or BACKWARD."""
    number: int
    """Index of its partition; 0 for a whole forest."""
    tokens: int
    """Tokens that each rank holds."""
    gathered: int
    """Values that each rank contributes to the gather of outputs."""
    has_graph: bool
    """True if a backward follows."""


def op_sizes(call: StepCall, batch: MicroBatch, ranks: SequenceParallel, *, is_known: bool) -> list[OpSize]:
    """Sizes of a forest's ops, in order; `is_known` is True if its rows' log-probs are known."""
    assert batch.forest is not None
    plan = batch.plan
    if plan is None:
        numbered = [(op, 0, call.trains) for op in (FORWARD + BACKWARD if call.trains else FORWARD)]
        tokens_of, partition_N = [batch.forest.num_unique], np.zeros(batch.forest.num_unique, dtype=np.int64)
    else:
        tokens_of, partition_N = [part.num_tokens for part in plan.partitions], plan.partition_of_token
        forwards = [(FORWARD, number, False) for kind, number in plan.ops if kind == "forward"]
        trained = [(op, number, True) for op, (_, number) in zip(training_ops(plan), plan.ops, strict=True)]
        previews = forwards if takes_preview(call, is_known=is_known) else []
        numbered = previews + trained if call.trains else forwards
    held = [ranks.own_tokens(tokens) for tokens in tokens_of]
    gathered = held if VALUES in call.outputs else _most_edges(call, batch, partition_N, tokens_of, ranks)
    return [
        OpSize(kind=kind, number=number, tokens=held[number], gathered=gathered[number], has_graph=has_graph)
        for kind, number, has_graph in numbered
    ]


def _most_edges(
    call: StepCall, batch: MicroBatch, partition_N: np.ndarray, tokens_of: Sequence[int], ranks: SequenceParallel
) -> list[int]:
    """`EdgeShare.most` of each partition: the edges of the rank with the most."""
    assert batch.forest is not None
    edges = edges_of_batch(call.rows, batch)
    source_E = edges.source_E
    local_N = np.arange(batch.forest.num_unique) if batch.plan is None else batch.plan.local_index
    return [
        EdgeShare.of(local_N[source_E[partition_N[source_E] == number]], tokens, ranks, "cpu").most
        for number, tokens in enumerate(tokens_of)
    ]


def stand_in_work(context: StepContext, call: StepCall, sizes: Sequence[OpSize]) -> Iterator[str]:
    """Run stand-ins of the given ops, if any; yields the kind of each before it runs."""
    alive: dict[int, torch.Tensor] = {}
    for size in sizes:
        yield size.kind
        ranks = context.ranks
        assert ranks is not None
        ranks.exchanges.pretend(size.tokens, size.gathered)
        if size.kind == BACKWARD:
            alive.pop(size.number).backward()
            continue
        with nullcontext() if size.has_graph else torch.no_grad():
            result = _forward(context, call, ranks)
        if size.has_graph:
            alive[size.number] = result


def _forward(context: StepContext, call: StepCall, ranks: SequenceParallel) -> torch.Tensor:
    """A scalar 0 with the graph of one token's outputs, gathered over the ranks as real outputs are."""
    forest = Forest.from_rows([[context.idle_token]])
    inputs = TreeInputs.from_forest(forest, context.device, ranks=ranks)
    with context.autocast():
        if VALUES in call.outputs:
            outputs = tree_values(context.module, forest, inputs)
        else:
            none, ones = np.zeros(1, dtype=bool), np.ones(1, dtype=np.float32)
            edges = partial(plan_edges, forest, none, ones, context.device, ranks=ranks)
            outputs = tree_log_probs(context.module, inputs, edges, extras=call.outputs)
    return torch.stack([value.sum() * 0 for value in outputs.present().values()]).sum().float()
