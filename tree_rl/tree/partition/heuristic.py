"""The linear-time plan: items from the leaves upwards, each token deciding what stays with it.

Fewest partitions below an item, then the least load on top of it, is the best that any plan can hand upwards, because
a larger load can always leave in a partition of its own. Exact packing at each token is thus exact for the whole.
"""

from collections.abc import Callable

from tree_rl.tree.partition.bins import EXACT_LOADS, Bins, bound_bins, pack_loads
from tree_rl.tree.partition.problem import KEPT, CutProblem, Cuts, measure_cuts, room_below, split_chain


def greedy_cuts(problem: CutProblem) -> tuple[Cuts, bool]:
    """Cut from the leaves upwards.

    Args:
        problem: I items.

    Returns:
        The cuts, and whether no plan has fewer partitions (True is a proof).
    """
    leader = [KEPT] * len(problem.length)
    certain = True

    def pack(loads: list[int], room: int, items: list[int]) -> tuple[int, int]:
        nonlocal certain
        bins, proven = pack_loads(loads, room, problem.capacity_tokens)
        certain &= proven
        _lead(bins, items, leader)
        return len(bins), sum(loads) - sum(loads[index] for content in bins for index in content)

    _walk_upwards(problem, pack)
    return measure_cuts(problem, leader), certain


def fewest_partitions(problem: CutProblem) -> int:
    """A lower bound on the number of partitions of any plan: packing is exact or bounded at each token.

    Args:
        problem: I items.
    """

    def pack(loads: list[int], room: int, _: list[int]) -> tuple[int, int]:
        capacity = problem.capacity_tokens
        if len(loads) > EXACT_LOADS:
            return bound_bins(loads, room, capacity)
        bins, _proven = pack_loads(loads, room, capacity)
        return len(bins), sum(loads) - sum(loads[index] for content in bins for index in content)

    return max(_walk_upwards(problem, pack), -(-problem.start[-1] // problem.capacity_tokens))


def least_relayed(problem: CutProblem, partitions: int) -> int:
    """A lower bound on the relayed tokens of a plan with so many partitions: all but the roots' hang from a cut.

    Args:
        problem: I items.
        partitions: of the plan.
    """
    capacity = problem.capacity_tokens
    cut_roots = [root for root in problem.roots if problem.length[root] > capacity or problem.children[root]]
    if not cut_roots:
        return 0
    highest = min(problem.length[root] if problem.length[root] <= capacity else 1 for root in cut_roots)
    return max(0, partitions - len(problem.roots)) * highest


def least_depth(problem: CutProblem, relayed_tokens: int) -> int:
    """A lower bound on the depth of plans that relay so many tokens.

    L partitions on a path cover at most L * C tokens of it; a subtree that is not cut fits into the last with what
    else it holds of the path.

    Args:
        problem: I items.
        relayed_tokens: more than 0 where something hangs from a cut.
    """
    longest = max((past + length for past, length in zip(problem.past, problem.length, strict=True)), default=0)
    return max(-(-longest // problem.capacity_tokens), 1 + (relayed_tokens > 0) if problem.length else 0)


def _walk_upwards(problem: CutProblem, pack: Callable[[list[int], int, list[int]], tuple[int, int]]) -> int:
    """Partitions of the forest when ``pack(loads, room, items)`` answers (bins, tokens kept) at each token."""
    top = [0] * len(problem.length)
    partitions = 0
    for item in range(len(top) - 1, -1, -1):
        kept, length = 0, problem.length[item]
        if problem.children[item]:
            loads = [top[child] for child in problem.children[item]]
            bins, kept = pack(loads, room_below(length, problem.capacity_tokens), problem.children[item])
            partitions += bins
        inner, top[item] = split_chain(length, kept, problem.capacity_tokens)
        partitions += inner
    bins, _ = pack([top[root] for root in problem.roots], 0, problem.roots)
    return partitions + bins


def _lead(bins: Bins, items: list[int], leader: list[int]) -> None:
    for content in bins:
        first = min(items[index] for index in content)
        for index in content:
            leader[items[index]] = first
