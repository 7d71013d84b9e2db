"""From chosen cuts to a plan: which tokens each partition runs, behind which past, and in which order.

Paper, section Redundancy-Free Tree Partitioning.
Legend: N unique tokens, I items, p partitions, n tokens of a partition, P tokens of its past.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.partition.problem import KEPT, CutProblem, Cuts

Op = tuple[Literal["forward", "backward"], int]
"""One step of the runner and the partition that it runs."""

SolverName = Literal["heuristic", "cp_sat"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cut:
    """A token of a partition below which children hang: one relay, however many children read it."""

    token: int
    """The unique token."""
    local_token: int
    """Its index in the partition."""
    path: np.ndarray
    """int32, indices in the partition of the token and its ancestors there, ascending. The past of a child is the past
    of this partition followed by these."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition:
    """Subtrees (without what was cut off below them) that hang from one token, or that are roots."""

    tokens: np.ndarray
    """int32 [n], unique tokens, ascending: the order of the forward."""
    parent: int
    """Partition that holds the cut token, -1 where there is no past."""
    cut_token: int
    """Unique token whose root-to-cut path is the past, -1 where there is none."""
    past_length: int
    """P, tokens of the past; 0 for roots."""
    position: np.ndarray
    """int32 [n], depth on the whole path: the RoPE position, past included."""
    local_subtree_end: np.ndarray
    """int32 [n], first index in the partition past the tokens that continue this one."""
    cuts: tuple[Cut, ...]
    """Tokens with children, ascending."""

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartitionPlan:
    """Partitions in order of their forwards: a parent comes before its children."""

    capacity_tokens: int
    """C, most unique tokens of a partition."""
    partitions: tuple[Partition, ...]
    """All partitions; every unique token is in exactly one."""
    partition_of_token: np.ndarray
    """int32 [N], partition of each unique token."""
    local_index: np.ndarray
    """int32 [N], index of each unique token in its partition."""
    ops: tuple[Op, ...]
    """Depth first: forward of a partition, all of each child in turn, then its backward."""
    relayed_tokens: int
    """Sum of the past lengths."""
    depth: int
    """Partitions on the longest path: most graphs alive at a time."""
    peak_live_tokens: int
    """Most unique tokens whose graphs are alive at a time."""
    lower_bound: int
    """No plan has fewer partitions."""
    solver: SolverName
    """Who found this plan."""
    is_optimal: bool
    """True if partitions, then relayed tokens, then depth are proven minimal."""

    @property
    def num_partitions(self) -> int:
        """Forwards, and backwards, of a step."""
        return len(self.partitions)

    @property
    def utilisation(self) -> float:
        """N / (partitions * C), 1 where every partition is full; 1 for an empty forest."""
        room = self.num_partitions * self.capacity_tokens
        return len(self.partition_of_token) / room if room else 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pieces:
    """Partitions before they are put into order."""

    start: list[int]
    """First unique token of each run; runs cover the layout without gaps."""
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
    solver: SolverName,
    is_optimal: bool,
) -> PartitionPlan:
    """Write out the plan that a choice of cuts makes; the last three arguments are fields of the plan."""
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
