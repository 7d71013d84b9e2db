"""The places where an optimal plan can cut a forest, and what a choice of cuts costs.

A subtree that fits into one partition is never cut inside: a cut above it also adds one partition and relays less. So
the forest reduces to I items: segments whose subtrees exceed the capacity, and whole subtrees below them or at roots.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest import Forest

KEPT = -1
"""Value in ``leader`` for an item that stays in its parent's partition."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutProblem:
    """I items in depth-first order. A partition is a set of sibling items with the descendants that stay with them."""

    capacity_tokens: int
    """C, most unique tokens of a partition."""
    start: list[int]
    """[I + 1], first unique token of each item; items cover all tokens without gaps, the last entry is N."""
    length: list[int]
    """[I], unique tokens of the item; only a segment can be longer than C."""
    past: list[int]
    """[I], tokens before the item on its path: what a cut above it relays."""
    parent: list[int]
    """[I], parent item, -1 at a root."""
    children: list[list[int]]
    """[I], items that follow the item's last token."""
    roots: list[int]
    """Items without a parent."""

    @property
    def num_pairs(self) -> int:
        """Pairs of siblings, which decide the size of the exact model."""
        return sum(len(group) * (len(group) - 1) // 2 for group in (*self.children, self.roots))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cuts:
    """A choice of cuts and its cost."""

    leader: list[int]
    """[I], KEPT if there is no cut above the item; else the first item of its partition: itself or an earlier one."""
    top: list[int]
    """[I], tokens in the partition of the item's first token, counted from that token downwards."""
    inner: list[int]
    """[I], number of cuts inside the item, placed by ``split_chain``."""
    partitions: int
    """Number of partitions."""
    relayed_tokens: int
    """Sum of the past lengths of all partitions."""
    depth: int
    """Partitions on the longest path."""

    @property
    def score(self) -> tuple[int, int, int]:
        """Costs that a plan minimises, most important first."""
        return self.partitions, self.relayed_tokens, self.depth


def reduce_forest(forest: Forest, capacity_tokens: int) -> CutProblem:
    """Reduce a forest to the items of its cut problem."""
    segments = forest.segments
    heavy = segments.subtree_end - segments.start > capacity_tokens
    is_root = segments.parent < 0
    is_item = is_root | heavy[segments.parent] if len(segments) else is_root
    item_of_segment = np.cumsum(is_item) - 1
    start = segments.start[is_item].tolist()
    parent = np.where(is_root, -1, item_of_segment[segments.parent])[is_item].tolist() if start else []
    children: list[list[int]] = [[] for _ in start]
    for item, above in enumerate(parent):
        if above >= 0:
            children[above].append(item)
    end = np.where(heavy, segments.end, segments.subtree_end)
    return CutProblem(
        capacity_tokens=capacity_tokens,
        start=[*start, forest.num_unique],
        length=(end - segments.start)[is_item].tolist(),
        past=segments.depth[is_item].tolist(),
        parent=parent,
        children=children,
        roots=[item for item, above in enumerate(parent) if above < 0],
    )


def split_chain(length: int, kept_tokens: int, capacity_tokens: int) -> tuple[int, int]:
    """Cut a segment that exceeds the capacity C into full pieces from the bottom; the remainder is on top.

    No other split has fewer pieces, a smaller remainder for the parent's partition, or higher cuts.

    Args:
        length: tokens of the segment.
        kept_tokens: tokens below the segment that stay with its last token; fewer than C.
        capacity_tokens: C.

    Returns:
        The number of cuts inside the segment, and ``top``, the tokens that stay with its first token. Cut j, from 0,
        is before token ``top + j * C`` of the segment.
    """
    total = length + kept_tokens
    if length <= capacity_tokens:
        return 0, total
    inner = (total - 1) // capacity_tokens
    return inner, total - inner * capacity_tokens


def room_below(length: int, capacity_tokens: int) -> int:
    """Most tokens below an item that can stay with its last token; a cut segment's last piece has 1 token or more."""
    return capacity_tokens - length if length <= capacity_tokens else capacity_tokens - 1


def measure_cuts(problem: CutProblem, leader: list[int]) -> Cuts:
    """Cost of a choice of cuts.

    Raises:
        ValueError: a partition exceeds the capacity, or a root is KEPT.
    """
    capacity = problem.capacity_tokens
    items = len(problem.length)
    top, inner = [0] * items, [0] * items
    kept, load = [0] * items, [0] * items
    relayed = partitions = 0
    for item in range(items - 1, -1, -1):
        if kept[item] > room_below(problem.length[item], capacity):
            raise ValueError(f"item {item}: {kept[item]} tokens kept below {problem.length[item]} exceed {capacity}")
        inner[item], top[item] = split_chain(problem.length[item], kept[item], capacity)
        first = leader[item]
        if first == KEPT:
            if problem.parent[item] < 0:
                raise ValueError(f"item {item}: a root has no partition to stay in")
            kept[problem.parent[item]] += top[item]
        else:
            load[first] += top[item]
            partitions += first == item
            relayed += problem.past[item] * (first == item)
        partitions += inner[item]
        above_first_cut = problem.past[item] + top[item]
        relayed += inner[item] * above_first_cut + capacity * (inner[item] * (inner[item] - 1) // 2)
    if max(load, default=0) > capacity:
        raise ValueError(f"item {load.index(max(load))}: its partition of {max(load)} tokens exceeds {capacity}")
    level: list[int] = []
    for item, above in enumerate(problem.parent):
        level.append((level[above] if above >= 0 else 0) + (leader[item] != KEPT) + inner[item])
    return Cuts(
        leader=leader,
        top=top,
        inner=inner,
        partitions=partitions,
        relayed_tokens=relayed,
        depth=max(level, default=0),
    )
