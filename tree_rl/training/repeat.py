"""After a CUDA out-of-memory error on any rank: catch up, agree on a smaller budget, run the call again.

The other ranks wait in a collective of the failed op. The failed rank follows the schedule to its end with one token
per op. Sequence-parallel ranks wait in exchanges as well; they have the same plan, so the failed rank knows the sizes
of all remaining exchanges. The values it sends are meaningless.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
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


def settle(
    context: StepContext, budget: MemoryBudget, runner: Runner, plan: StepPlan, ran: PlanRun | None
) -> PlanRun | None:
    """Return `ran`, or None if any rank ran out of memory and all have agreed on a smaller budget.

    All ranks call this with a plan that may be repeated; `ran` is None on a rank that ran out of memory.
    """
    if ran is None:
        _catch_up(context, runner, plan)
    tokens = budget.shrink_after(ran is None, plan.batches, plan.max_tokens)
    if tokens is None:
        return ran
    logger.warning(
        "CUDA ran out of memory%s; all ranks repeat the step with tree.max_tokens=%d",
        " on this rank" if ran is None else " on another rank",
        tokens,
    )
    return None


def _catch_up(context: StepContext, runner: Runner, plan: StepPlan) -> None:
    """Issue the remaining collectives of the call, for which the other ranks wait."""
    for counter in context.counters:
        counter.restart()
    torch.cuda.empty_cache()
    if context.num_ranks > 1 and (context.collectives is not None or context.ranks is not None):
        runner.follow(plan, stand_in_work(context, plan))
    for counter in context.counters:
        counter.start()


def stand_in_work(context: StepContext, plan: StepPlan) -> Iterator[str]:
    """Run stand-ins of this rank's ops under sequence parallelism, none without it; yields the kind of each before it
    runs."""
    call, ranks = plan.call, context.ranks
    if ranks is None:
        return
    for batch, known_f in zip(plan.batches, plan.known, strict=True):
        assert batch.forest is not None
        if batch.plan is None:
            ops = [(op, 0, call.trains) for op in (FORWARD + BACKWARD if call.trains else FORWARD)]
            tokens_of, partition_N = [batch.forest.num_unique], np.zeros(batch.forest.num_unique, dtype=np.int64)
        else:
            tokens_of, partition_N = [one.num_tokens for one in batch.plan.partitions], batch.plan.partition_of_token
            forwards = [(FORWARD, number, False) for kind, number in batch.plan.ops if kind == "forward"]
            pairs = zip(training_ops(batch.plan), batch.plan.ops, strict=True)
            trained = [(op, number, True) for op, (_, number) in pairs]
            previews = forwards if takes_preview(call, is_known=known_f is not None) else []
            ops = previews + trained if call.trains else forwards
        held = [ranks.own_tokens(tokens) for tokens in tokens_of]
        gathered = held if VALUES in call.outputs else _most_edges(call, batch, partition_N, tokens_of, ranks)
        alive: dict[int, torch.Tensor] = {}
        for kind, number, has_graph in ops:
            yield kind
            ranks.exchanges.pretend(held[number], gathered[number])
            if kind == BACKWARD:
                alive.pop(number).backward()
                continue
            with nullcontext() if has_graph else torch.no_grad():
                result = _forward(context, call, ranks)
            if has_graph:
                alive[number] = result


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
