"""Turns chosen cuts into a plan: the tokens of each partition, its past, and the order of forwards and backwards.

Paper, section Redundancy-Free Tree Partitioning.
Legend: N unique tokens, p partitions, n tokens of a partition, P tokens of its past.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.partition.problem import KEPT, CutProblem, Cuts

Op = tuple[Literal["forward", "backward"], int]
"""A pass and the partition that it runs."""

SolverName = Literal["heuristic", "cp_sat"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cut:
    """A token of a partition below which child partitions start: one relay, however many children read it."""

    token: int
    """Index of the cut token among the unique tokens."""
    local_token: int
    """Index of the cut token in the partition."""
    path: np.ndarray
    """int32, ascending indices in the partition of the cut token and its ancestors. A child's past is this partition's
    past followed by these tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition:
    """Subtrees below one cut token, or whole trees, without the parts that are cut off further down."""

    tokens: np.ndarray
    """int32 [n], unique tokens, ascending: the order of the forward."""
    parent: int
    """Partition that holds the cut token, -1 without a past."""
    cut_token: int
    """Unique token at the end of the past, -1 without a past."""
    past_length: int
    """P, tokens on the path from the root to the cut token; 0 without a past."""
    position: np.ndarray
    """int32 [n], depth on the whole path, past included: the RoPE position."""
    local_subtree_end: np.ndarray
    """int32 [n], first index in the partition past the token's subtree."""
    cuts: tuple[Cut, ...]
    """Tokens below which child partitions start, ascending."""

    @property
    def num_tokens(self) -> int:
        """n, tokens of the partition."""
        return len(self.tokens)

    @property
    def relayed_tokens(self) -> np.ndarray:
        """int32, ascending indices in the partition of the tokens on any path to one of its cuts."""
        return np.unique(np.concatenate([np.empty(0, dtype=np.int32), *(cut.path for cut in self.cuts)]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartitionPlan:
    """Partitions in the order of their forwards: a parent comes before its children."""

    capacity_tokens: int
    """C, most unique tokens of a partition."""
    partitions: tuple[Partition, ...]
    """All partitions; every unique token is in exactly one of them."""
    partition_of_token: np.ndarray
    """int32 [N], partition of each unique token."""
    local_index: np.ndarray
    """int32 [N], index of each unique token in its partition."""
    ops: tuple[Op, ...]
    """Depth-first schedule: the forward of a partition, then each child's subtree, then its backward."""
    relayed_tokens: int
    """Sum of the past lengths of all partitions."""
    depth: int
    """Partitions on the longest path: most autograd graphs alive at a time."""
    peak_live_tokens: int
    """Most unique tokens whose graphs are alive at a time."""
    lower_bound: int
    """Proven lower bound on the number of partitions."""
    solver: SolverName
    """Algorithm that found the plan."""
    is_optimal: bool
    """True if partitions, then relayed tokens, then depth are proven minimal."""

    @property
    def num_partitions(self) -> int:
        """Number of partitions."""
        return len(self.partitions)

    @property
    def utilisation(self) -> float:
        """N / (partitions * C): 1 if every partition is full, and for an empty forest."""
        room = self.num_partitions * self.capacity_tokens
        return len(self.partition_of_token) / room if room else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pieces:
    """Partitions, not yet in the order of their forwards, and the runs of consecutive unique tokens they consist of."""

    start: list[int]
    """First unique token of each run; the runs cover all tokens without gaps."""
    partition: list[int]
    """Partition of each run."""
    cut_token: list[int]
    """[p], cut token above the partition, -1 without a past."""
    parent: list[int]
    """[p], parent partition, smaller than the partition's own number; -1 without a past."""


def lay_out_partitions(
    forest: Forest,
    problem: CutProblem,
    cuts: Cuts,
    *,
    lower_bound: int,
    solver: SolverName,
    is_optimal: bool,
) -> PartitionPlan:
    """The plan that follows from a choice of cuts; the last three arguments are fields of the plan."""
    pieces = _pieces(forest, problem, cuts)
    order, ops = _depth_first(pieces.parent)
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    parents = [int(number[above]) if above >= 0 else -1 for above in (pieces.parent[old] for old in order)]
    start = np.array([*pieces.start, forest.num_unique], dtype=np.int64)
    partition_of_token = np.repeat(number[pieces.partition], start[1:] - start[:-1])
    by_partition = np.argsort(partition_of_token, kind="stable").astype(np.int32)
    sizes = np.bincount(partition_of_token, minlength=len(order))
    ends = np.cumsum(sizes)
    local_index = np.empty(forest.num_unique, dtype=np.int32)
    local_index[by_partition] = np.arange(forest.num_unique) - np.repeat(ends - sizes, sizes)
    cut_tokens = [pieces.cut_token[old] for old in order]
    tokens = np.split(by_partition, ends[:-1]) if len(order) else []
    partitions = _partitions(forest, tokens, local_index, parents, cut_tokens)
    live: list[int] = []
    for size, above in zip(sizes.tolist(), parents, strict=True):
        live.append(size + (live[above] if above >= 0 else 0))
    return PartitionPlan(
        capacity_tokens=problem.capacity_tokens,
        partitions=partitions,
        partition_of_token=partition_of_token,
        local_index=local_index,
        ops=ops,
        relayed_tokens=sum(partition.past_length for partition in partitions),
        depth=cuts.depth,
        peak_live_tokens=max(live, default=0),
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
    """Partitions in the order of their forwards, and the ops, which use the numbers in that order."""
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
    forest: Forest, tokens_of: list[np.ndarray], local_index: np.ndarray, parents: list[int], cut_tokens: list[int]
) -> tuple[Partition, ...]:
    cuts_of: list[set[int]] = [set() for _ in parents]
    for above, cut_token in zip(parents, cut_tokens, strict=True):
        if above >= 0:
            cuts_of[above].add(cut_token)
    partitions = []
    for tokens, parent, cut_token, cuts in zip(tokens_of, parents, cut_tokens, cuts_of, strict=True):
        ends = np.searchsorted(tokens, forest.subtree_end[tokens]).astype(np.int32)
        partition = Partition(
            tokens=tokens,
            parent=parent,
            cut_token=cut_token,
            past_length=int(forest.position[cut_token]) + 1 if cut_token >= 0 else 0,
            position=forest.position[tokens],
            local_subtree_end=ends,
            cuts=tuple(_cut(token, int(local_index[token]), ends) for token in sorted(cuts)),
        )
        partitions.append(partition)
    return tuple(partitions)


def _cut(token: int, local_token: int, local_subtree_end: np.ndarray) -> Cut:
    path = np.flatnonzero(local_subtree_end[: local_token + 1] > local_token).astype(np.int32)
    return Cut(token=token, local_token=local_token, path=path)
