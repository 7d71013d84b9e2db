"""From chosen cuts to a plan: tokens, pasts, gateways and the order of execution.

Legend: N unique tokens, I items, p partitions.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.partition_plan import Cut, Op, Partition, PartitionPlan
from tree_rl.tree.partition_problem import KEPT, CutProblem, Cuts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pieces:
    """Partitions before they are put into order."""

    start: list[int]
    """First unique token of each run of one partition; runs cover the layout without gaps."""
    partition: list[int]
    """Partition of each run."""
    cut_token: list[int]
    """[p], -1 without a past."""
    parent: list[int]
    """[p], smaller than the partition; -1 without a past."""


def lay_out_partitions(
    forest: Forest,
    problem: CutProblem,
    cuts: Cuts,
    *,
    lower_bound: int,
    solver: Literal["heuristic", "cp_sat"],
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
    runs = np.diff([*pieces.start, forest.num_unique])
    partition_of_token = np.repeat(number[pieces.partition], runs)
    sizes = np.bincount(partition_of_token, minlength=len(order))
    by_partition = np.argsort(partition_of_token, kind="stable").astype(np.int32)
    first = np.cumsum(sizes) - sizes
    local_index = np.empty(forest.num_unique, dtype=np.int32)
    local_index[by_partition] = np.arange(forest.num_unique) - np.repeat(first, sizes)
    parents = [int(number[above]) if above >= 0 else -1 for above in (pieces.parent[old] for old in order)]
    cut_tokens = [pieces.cut_token[old] for old in order]
    partitions = _partitions(forest, partition_of_token, local_index, parents, cut_tokens)
    return PartitionPlan(
        capacity_tokens=problem.capacity_tokens,
        partitions=partitions,
        partition_of_token=partition_of_token,
        local_index=local_index,
        ops=ops,
        relayed_tokens=sum(partition.past_length for partition in partitions),
        depth=cuts.depth,
        peak_live_tokens=_peak_live_tokens(sizes.tolist(), parents),
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


def _partitions(
    forest: Forest,
    partition_of_token: np.ndarray,
    local_index: np.ndarray,
    parents: list[int],
    cut_tokens: list[int],
) -> tuple[Partition, ...]:
    tokens_of = _grouped(partition_of_token, len(parents))
    inner = np.flatnonzero(forest.parent >= 0)
    partition_of_edge = partition_of_token[forest.parent[inner]]
    edges_of = [inner[edges].astype(np.int32) for edges in _grouped(partition_of_edge, len(parents))]
    hanging: list[dict[int, list[int]]] = [{} for _ in parents]
    for number, (above, cut_token) in enumerate(zip(parents, cut_tokens, strict=True)):
        if above >= 0:
            hanging[above].setdefault(cut_token, []).append(number)
    partitions = []
    for number, (tokens, edges) in enumerate(zip(tokens_of, edges_of, strict=True)):
        ends = np.searchsorted(tokens, forest.subtree_end[tokens]).astype(np.int32)
        above = forest.parent[tokens]
        is_inside = (above >= 0) & (partition_of_token[above] == number)
        cut_token = cut_tokens[number]
        partitions.append(
            Partition(
                tokens=tokens,
                parent=parents[number],
                cut_token=cut_token,
                past_length=int(forest.position[cut_token]) + 1 if cut_token >= 0 else 0,
                position=forest.position[tokens],
                local_parent=np.where(is_inside, local_index[above], -1).astype(np.int32),
                local_subtree_end=ends,
                edge_token=edges,
                edge_start=local_index[forest.parent[edges]],
                cuts=tuple(
                    _cut(forest, token, int(local_index[token]), ends, children)
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


def _grouped(group_of: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """int32 indices of each group, ascending."""
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    ends = np.cumsum(np.bincount(group_of, minlength=num_groups))
    return np.split(order, ends[:-1]) if num_groups else []


def _peak_live_tokens(sizes: list[int], parents: list[int]) -> int:
    live: list[int] = []
    for size, above in zip(sizes, parents, strict=True):
        live.append(size + (live[above] if above >= 0 else 0))
    return max(live, default=0)
