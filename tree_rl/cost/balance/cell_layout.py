"""Distributes a mini-batch over D ranks so that the slowest rank is fast: greedy, then moves and swaps.

Groups stay whole unless a split saves more than `LEAST_GAIN`. Equal inputs give equal layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.cost.balance.parts import Parts
from tree_rl.cost.balance.paths import GroupPaths
from tree_rl.cost.balance.search import Search, placement_cost
from tree_rl.tree.packing import largest_first, least_loaded

LEAST_GAIN = 0.01
"""Share of the slowest rank's time that splitting groups must save; otherwise they stay whole."""
MOST_TRIALS = 12_000
"""Most comparisons for one layout, about two seconds; a count instead of a time limit, so results are reproducible."""
MOST_SEPARATE_PATHS = 600
"""Most paths for which the search for a split also starts from every path placed separately."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellLayout:
    """The rows that every rank trains in one optimizer step."""

    rows: tuple[tuple[tuple[int, np.ndarray], ...], ...]
    """For each rank, its groups with the indices of their rows on this rank, in depth-first order."""
    load_D: np.ndarray
    """float64 [D], predicted cost of every rank."""
    bound: float
    """Lower bound on the slowest rank's cost: the costliest row, or the mean load with whole groups."""
    split_groups: int
    """Number of groups on several ranks."""


def lay_out_cell(groups: Sequence[GroupPaths], num_ranks: int, *, trials: int = MOST_TRIALS) -> CellLayout:
    """Place the rows of a mini-batch's groups on D ranks, with at most `trials` comparisons of two ranks."""
    mean = sum(group.whole for group in groups) / num_ranks
    bound = max([mean, *(group.longest_row for group in groups)])
    parts = Search(bound, trials // 4, only_whole=True).improve(_whole_groups(groups, num_ranks))
    if num_ranks > 1 and parts.highest > bound * (1 + LEAST_GAIN):
        search = Search(bound, trials, only_whole=False)
        split = search.kick(min((search.improve(start) for start in _starts(parts)), key=placement_cost))
        _reunite(split)
        if split.highest < parts.highest * (1 - LEAST_GAIN):
            parts = split
    rows = tuple(
        tuple((group, np.concatenate([groups[group].rows[path] for path in held[group]])) for group in sorted(held))
        for held in parts.on_rank
    )
    split_groups = sum(len(ranks) > 1 for ranks in parts.ranks_of)
    return CellLayout(rows=rows, load_D=parts.load_D, bound=bound, split_groups=split_groups)


def _whole_groups(groups: Sequence[GroupPaths], num_ranks: int) -> Parts:
    """Greedy start: costliest group first, each on the rank with the least cost."""
    parts = Parts(groups, num_ranks)
    for rank, content in enumerate(least_loaded([group.whole for group in groups], num_ranks)):
        parts.fill(rank, content)
    return parts


def _starts(whole: Parts) -> list[Parts]:
    """Starts of the search for a split: whole groups, and every path placed on the rank that finishes it first."""
    groups = whole.groups
    if sum(one.num_paths for one in groups) > MOST_SEPARATE_PATHS:
        return [whole.copy()]
    apart = Parts(groups, whole.num_ranks)
    paths = [(group, path) for group, one in enumerate(groups) for path in range(one.num_paths)]
    for index in largest_first([groups[group].alone_P[path] for group, path in paths]):
        group, path = paths[index]
        # Among ranks without the group only the load matters, so the least loaded one is enough.
        other_load_D = apart.load_D.copy()
        other_load_D[list(apart.ranks_of[group])] = np.inf
        candidates = [*sorted(apart.ranks_of[group]), int(other_load_D.argmin())]
        one = np.array([path])
        ends = [
            apart.load_D[rank]
            - (groups[group].cost(held) if len(held) else 0.0)
            + groups[group].cost(np.union1d(held, one))
            for rank in candidates
            for held in [apart.on_rank[rank].get(group, np.zeros(0, dtype=np.int64))]
        ]
        apart.put(candidates[int(np.argmin(ends))], group, one)
    return [whole.copy(), apart]


def _reunite(parts: Parts) -> None:
    """Join parts of a group where that makes no rank slower than the slowest; in place."""
    highest = parts.highest
    for group, ranks in enumerate(parts.ranks_of):
        for source in sorted(ranks):
            for target in sorted(parts.ranks_of[group] - {source}):
                one, moved, held = parts.groups[group], parts.on_rank[source][group], parts.on_rank[target][group]
                if parts.load_D[target] + (one.cost(np.union1d(held, moved)) - one.cost(held)) <= highest:
                    parts.move(source, target, group, moved)
                    break
