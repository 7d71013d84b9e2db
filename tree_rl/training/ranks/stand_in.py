"""What a rank runs in place of its own ops after it failed within one: a single token, exchanges of the ops' sizes.

The ranks that share its tokens wait in an exchange of the failed op. Its own plan is theirs, so it knows the sizes of
all exchanges to come; what it sends is void, and all ranks then repeat the call.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.training.context import StepCall, StepContext
from tree_rl.training.loss.edges import plan_edges
from tree_rl.training.loss.outputs import VALUES, beside_log_probs
from tree_rl.training.partitioned import training_ops
from tree_rl.training.planning.micro_batches import MicroBatch
from tree_rl.training.ranks.lock_step import BACKWARD, FORWARD
from tree_rl.training.whole import tree_log_probs, tree_values
from tree_rl.tree.forest import Forest


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSize:
    """One forward or backward of a micro-batch."""

    kind: str
    """FORWARD or BACKWARD."""
    number: int
    """Of its partition; 0 for a whole forest."""
    tokens: int
    """That each rank holds in it."""
    gathered: int
    """Values that each rank gives to a gather."""
    has_graph: bool
    """Whether a backward follows."""


def op_sizes(call: StepCall, batch: MicroBatch, ops: str, ranks: SequenceParallel) -> list[OpSize]:
    """Sizes of a micro-batch's own ops, in order.

    Args:
        call: what is asked.
        batch: a forest, whole or in partitions.
        ops: of its run.
        ranks: share its tokens.
    """
    assert batch.forest is not None
    plan = batch.plan
    if plan is None:
        numbered = [(op, 0, call.trains) for op in ops]
        tokens_of, partition_N = [batch.forest.num_unique], np.zeros(batch.forest.num_unique, dtype=np.int64)
    else:
        tokens_of, partition_N = [part.num_tokens for part in plan.partitions], plan.partition_of_token
        forwards = [(FORWARD, number, False) for kind, number in plan.ops if kind == "forward"]
        trained = [(FORWARD if kind == "forward" else BACKWARD, number, True) for kind, number in plan.ops]
        previews = forwards if len(ops) > len(training_ops(plan)) else []
        numbered = previews + trained if call.trains else forwards
    own = [ranks.own_tokens(tokens) for tokens in tokens_of]
    gathered = own if VALUES in call.outputs else _most_edges(call, batch, partition_N, own, ranks.size)
    return [
        OpSize(kind=kind, number=number, tokens=own[number], gathered=gathered[number], has_graph=has_graph)
        for kind, number, has_graph in numbered
    ]


def _most_edges(call: StepCall, batch: MicroBatch, partition_N: np.ndarray, own: Sequence[int], size: int) -> list[int]:
    """Of each partition, the edges of the rank with the most, as the shares of its edges count them."""
    assert batch.forest is not None
    rows = list(batch.rows)
    edges = plan_edges(batch.forest, call.rows.wanted_F[call.rows.flat_positions(rows)], call.rows.temperature_B[rows])
    source_E = edges.source_R[edges.row_of_edge_E]
    local_N = np.arange(batch.forest.num_unique) if batch.plan is None else batch.plan.local_index
    most = []
    for number, tokens in enumerate(own):
        source_e = source_E[partition_N[source_E] == number]
        count = np.bincount(local_N[source_e] // tokens, minlength=size)
        most.append(max(int(count.max()), 1))
    return most


def stand_in_work(context: StepContext, call: StepCall, sizes: Sequence[OpSize]) -> Iterator[str]:
    """Runs stand-ins of the given ops, if any; yields the kind of each before it runs."""
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
    """A scalar 0 with the graph of one token's outputs, gathered as those of all tokens are."""
    forest = Forest.from_rows([[0]])
    inputs = TreeInputs.from_forest(forest, context.device, ranks=ranks)
    with context.autocast():
        if VALUES in call.outputs:
            outputs = tree_values(context.module, forest, inputs)
        else:
            edges = plan_edges(
                forest, np.zeros(1, dtype=bool), np.ones(1, dtype=np.float32), context.device, ranks=ranks
            )
            outputs = tree_log_probs(context.module, inputs, edges, extras=beside_log_probs(call.outputs))
    return torch.stack([value.sum() * 0 for value in outputs.present().values()]).sum().float()
