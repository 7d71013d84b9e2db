"""From chosen cuts to a plan: tokens, pasts, gateways and the order of execution.

Legend: N unique tokens, I items, p partitions, r runs.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.partition.plan import Cut, Op, Partition, PartitionPlan, SolverName
from tree_rl.tree.partition.problem import KEPT, CutProblem, Cuts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pieces:
    """Partitions before they are put into order."""

    start: list[int]
    """[r], first unique token of each run; runs cover the layout without gaps. A run is part of a segment or a whole
    subtree: only its first token can follow a token outside."""
    partition: list[int]
    """[r], partition of each run."""
    cut_token: list[int]
    """[p], -1 without a past."""
    parent: list[int]
    """[p], smaller than the partition; -1 without a past."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Runs:
    """Runs by the final numbers of their partitions."""

    partition_of_token: np.ndarray
    """int32 [N]."""
    local_index: np.ndarray
    """int32 [N]."""
    tokens: list[np.ndarray]
    """[p] of int32, tokens of each partition."""
    lengths: list[np.ndarray]
    """[p], tokens of each of its runs."""
    hanging_heads: list[np.ndarray]
    """[p] of int32, first tokens of runs that follow one of its tokens, ascending."""


def lay_out_partitions(
    forest: Forest,
    problem: CutProblem,
    cuts: Cuts,
    *,
    lower_bound: int,
    solver: SolverName,
    is_optimal: bool,
) -> PartitionPlan:
    """Write out a plan.

    Args:
        forest: N unique tokens.
        problem: the forest's items.
        cuts: a choice of cuts.
        lower_bound: proven least number of partitions.
        solver: who chose.
        is_optimal: whether the choice is proven best.

    Returns:
        The plan; no partitions for an empty forest.
    """
    pieces = _pieces(forest, problem, cuts)
    order, ops = _depth_first(pieces.parent)
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    parents = [int(number[above]) if above >= 0 else -1 for above in (pieces.parent[old] for old in order)]
    cut_tokens = [pieces.cut_token[old] for old in order]
    runs = _runs(forest, pieces, number)
    partitions = _partitions(forest, runs, parents, cut_tokens)
    return PartitionPlan(
        capacity_tokens=problem.capacity_tokens,
        partitions=partitions,
        partition_of_token=runs.partition_of_token,
        local_index=runs.local_index,
        ops=ops,
        relayed_tokens=sum(partition.past_length for partition in partitions),
        depth=cuts.depth,
        peak_live_tokens=_peak_live_tokens([partition.num_tokens for partition in partitions], parents),
        lower_bound=lower_bound,
        solver=solver,
        is_optimal=is_optimal,
    )


def _pieces(forest: Forest, problem: CutProblem, cuts: Cuts) -> _Pieces:
    pieces = _Pieces(start=[], partition=[], cut_token=[], parent=[])
    partition_at_start, partition_at_end = [0] * len(problem.length), [0] * len(problem.length)

    def begin(cut_token: int, parent: int) -> int:
        pieces.cut_token.append(cut_token)
        pieces.parent.append(parent)
        return len(pieces.parent) - 1

    for item, above in enumerate(problem.parent):
        start, leader = problem.start[item], cuts.leader[item]
        if leader == KEPT:
            here = partition_at_end[above]
        elif leader < item:
            here = partition_at_start[leader]
        else:
            here = begin(int(forest.parent[start]), partition_at_end[above] if above >= 0 else -1)
        partition_at_start[item] = here
        pieces.start.append(start)
        pieces.partition.append(here)
        for cut in range(cuts.inner[item]):
            below = start + cuts.top[item] + cut * problem.capacity_tokens
            here = begin(below - 1, here)
            pieces.start.append(below)
            pieces.partition.append(here)
        partition_at_end[item] = here
    return pieces


def _depth_first(parent: list[int]) -> tuple[list[int], tuple[Op, ...]]:
    """Partitions in order of their forwards, and the ops over their new numbers."""
    children: list[list[int]] = [[] for _ in parent]
    for partition, above in enumerate(parent):
        if above >= 0:
            children[above].append(partition)
    order: list[int] = []
    ops: list[Op] = []
    waiting = [(partition, -1) for partition, above in enumerate(parent) if above < 0][::-1]
    while waiting:
        partition, number = waiting.pop()
        if number >= 0:
            ops.append(("backward", number))
            continue
        ops.append(("forward", len(order)))
        waiting.append((partition, len(order)))
        waiting += [(child, -1) for child in reversed(children[partition])]
        order.append(partition)
    return order, tuple(ops)


def _runs(forest: Forest, pieces: _Pieces, number: np.ndarray) -> _Runs:
    start = np.array(pieces.start, dtype=np.int32)
    partition = number[pieces.partition]
    length = np.diff(start, append=np.int32(forest.num_unique))
    order = np.argsort(partition, kind="stable")
    runs_in = np.cumsum(np.bincount(partition, minlength=len(number)))
    borders = np.cumsum(length[order])
    shift = (start[order] - borders + length[order]).astype(np.int32)
    first_of_partition = np.concatenate(([0], borders[runs_in - 1]))[:-1]
    offset = np.empty_like(shift)
    offset[order] = shift + first_of_partition[partition[order]]
    tokens = np.arange(forest.num_unique, dtype=np.int32)
    above = forest.parent[start]
    heads = start[above >= 0]
    partition_of_token = np.repeat(partition, length)
    holder = partition_of_token[above[above >= 0]]
    by_holder = np.argsort(holder, kind="stable")
    heads_of = np.cumsum(np.bincount(holder, minlength=len(number)))
    return _Runs(
        partition_of_token=partition_of_token,
        local_index=tokens - np.repeat(offset, length),
        tokens=_split(tokens + np.repeat(shift, length[order]), borders[runs_in - 1]),
        lengths=_split(length[order], runs_in),
        hanging_heads=_split(heads[by_holder], heads_of),
    )


def _split(values: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    """One view per end; no ends give no views."""
    return np.split(values, ends[:-1]) if len(ends) else []


def _partitions(forest: Forest, runs: _Runs, parents: list[int], cut_tokens: list[int]) -> tuple[Partition, ...]:
    hanging: list[dict[int, list[int]]] = [{} for _ in parents]
    for number, (above, cut_token) in enumerate(zip(parents, cut_tokens, strict=True)):
        if above >= 0:
            hanging[above].setdefault(cut_token, []).append(number)
    partitions = []
    for number, (tokens, lengths) in enumerate(zip(runs.tokens, runs.lengths, strict=True)):
        first = np.cumsum(lengths) - lengths
        heads = tokens[first]
        local_parent = forest.parent[tokens] - tokens + np.arange(len(tokens), dtype=np.int32)
        local_parent[first] = _local_or_none(runs, forest.parent[heads], number)
        past_head = forest.subtree_end[heads]
        ends = forest.subtree_end[tokens]
        ends += np.repeat((np.searchsorted(tokens, past_head) - past_head).astype(np.int32), lengths)
        inside, hanging_heads = np.delete(tokens, first), runs.hanging_heads[number]
        edges = np.insert(inside, np.searchsorted(inside, hanging_heads), hanging_heads)
        cut_token = cut_tokens[number]
        partitions.append(
            Partition(
                tokens=tokens,
                parent=parents[number],
                cut_token=cut_token,
                past_length=int(forest.position[cut_token]) + 1 if cut_token >= 0 else 0,
                position=forest.position[tokens],
                local_parent=local_parent,
                local_subtree_end=ends,
                edge_token=edges,
                edge_start=runs.local_index[forest.parent[edges]],
                cuts=tuple(
                    _cut(forest, token, int(runs.local_index[token]), ends, children)
                    for token, children in sorted(hanging[number].items())
                ),
                children=tuple(sorted(child for group in hanging[number].values() for child in group)),
            )
        )
    return tuple(partitions)


def _cut(forest: Forest, token: int, local_token: int, local_subtree_end: np.ndarray, children: list[int]) -> Cut:
    path = np.flatnonzero(local_subtree_end[: local_token + 1] > local_token).astype(np.int32)
    return Cut(
        token=token,
        local_token=local_token,
        path=path,
        past_length=int(forest.position[token]) + 1,
        children=tuple(children),
    )


def _local_or_none(runs: _Runs, tokens: np.ndarray, partition: int) -> np.ndarray:
    """Indices of the tokens in the partition, -1 for those outside and for -1."""
    is_inside = (tokens >= 0) & (runs.partition_of_token[tokens] == partition)
    return np.where(is_inside, runs.local_index[tokens], -1)


def _peak_live_tokens(sizes: list[int], parents: list[int]) -> int:
    live: list[int] = []
    for size, above in zip(sizes, parents, strict=True):
        live.append(size + (live[above] if above >= 0 else 0))
    return max(live, default=0)
