"""The parts of a mini-batch on D ranks whose slowest rank is fastest: greedy, then moves and swaps on the slowest rank.

Groups stay whole unless a split saves more than `LEAST_GAIN`. Equal inputs give equal layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.cost.balance.parts import Parts
from tree_rl.cost.balance.paths import GroupPaths
from tree_rl.cost.balance.search import Search, order
from tree_rl.tree.bins import largest_first, least_loaded

LEAST_GAIN = 0.01
"""Share of the slowest rank's time that splitting groups must save; below it they stay whole."""
MOST_TRIALS = 12_000
"""Comparisons that one layout makes, about two seconds: counted, so that it is always the same."""
MOST_APART = 600
"""Splitting also starts from all paths apart where there are no more of them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellLayout:
    """What every rank trains in one optimizer step."""

    rows: tuple[tuple[tuple[int, np.ndarray], ...], ...]
    """Per rank its groups, each with the indices of its rows that run there, in depth-first order."""
    load_D: np.ndarray
    """float64 [D], predicted cost of every rank."""
    bound: float
    """No layout's slowest rank is faster: the costliest row, or the mean of whole groups."""
    split_groups: int
    """Groups that lie on several ranks."""


def lay_out_cell(groups: Sequence[GroupPaths], num_ranks: int, *, trials: int = MOST_TRIALS) -> CellLayout:
    """Place every row of every group on one of D ranks.

    Args:
        groups: of one mini-batch; none leave all ranks empty.
        num_ranks: D.
        trials: most comparisons of two ranks that the search makes.
    """
    mean = sum(group.whole for group in groups) / num_ranks
    bound = max([mean, *(group.longest_row for group in groups)])
    parts = Search(bound, trials // 4, only_whole=True).improve(_whole_groups(groups, num_ranks))
    if num_ranks > 1 and parts.highest > bound * (1 + LEAST_GAIN):
        search = Search(bound, trials, only_whole=False)
        split = search.kick(min((search.improve(start) for start in _starts(parts)), key=order))
        _reunite(split)
        if split.highest < parts.highest * (1 - LEAST_GAIN):
            parts = split
    rows = tuple(
        tuple((group, np.concatenate([groups[group].rows[path] for path in held[group]])) for group in sorted(held))
        for held in parts.on_rank
    )
    return CellLayout(rows=rows, load_D=parts.load_D, bound=bound, split_groups=parts.num_split)


def _whole_groups(groups: Sequence[GroupPaths], num_ranks: int) -> Parts:
    """Costliest group first, each on the rank with the least cost."""
    parts = Parts(groups, num_ranks)
    for rank, content in enumerate(least_loaded([group.whole for group in groups], num_ranks)):
        for group in content:
            parts.put(rank, group, np.arange(groups[group].num_paths))
    return parts


def _starts(whole: Parts) -> list[Parts]:
    """Where splitting starts: from whole groups, and from every path on the rank where it ends first."""
    groups = whole.groups
    if sum(one.num_paths for one in groups) > MOST_APART:
        return [whole.copy()]
    apart = Parts(groups, whole.num_ranks)
    paths = [(group, path) for group, one in enumerate(groups) for path in range(one.num_paths)]
    for index in largest_first([groups[group].alone_P[path] for group, path in paths]):
        group, path = paths[index]
        # Ranks that run none of the group differ by their load alone.
        strange = apart.load_D.copy()
        strange[list(apart.ranks_of[group])] = np.inf
        candidates = [*sorted(apart.ranks_of[group]), int(strange.argmin())]
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
    """Bring parts of a group together where no rank becomes slower than the slowest; in place."""
    highest = parts.highest
    for group, ranks in enumerate(parts.ranks_of):
        for source in sorted(ranks):
            for target in sorted(parts.ranks_of[group] - {source}):
                after = parts.load_D[target] + _joined_cost(parts, group, source, target)
                if after <= highest:
                    parts.move(source, target, group, parts.on_rank[source][group])
                    break


def _joined_cost(parts: Parts, group: int, source: int, target: int) -> float:
    """What all of the group's paths on one rank would add to another that runs some of the group."""
    one, held = parts.groups[group], parts.on_rank[target][group]
    return one.cost(np.union1d(held, parts.on_rank[source][group])) - one.cost(held)
