"""The linear-time plan: from the leaves upwards, each item decides which of its children stay in its partition.

The best state that an item can pass to its parent has the fewest partitions below, then the smallest remaining load:
saving a partition is worth more than any load, which can always be cut off as one partition. So packing exactly at
every item gives an optimal plan.
"""

from collections.abc import Callable

from tree_rl.tree.partition.exact_bins import EXACT_LOADS, bound_bins, kept_tokens, pack_loads
from tree_rl.tree.partition.problem import KEPT, CutProblem, Cuts, measure_cuts, room_below, split_chain


def greedy_cuts(problem: CutProblem) -> tuple[Cuts, bool]:
    """The cuts, and True if it is proven that no plan has fewer partitions or relays fewer tokens."""
    leader = [KEPT] * len(problem.length)
    certain = True

    def pack(loads: list[int], room: int, items: list[int]) -> tuple[int, int]:
        nonlocal certain
        bins, proven = pack_loads(loads, room, problem.capacity_tokens)
        certain &= proven
        for content in bins:
            first = min(items[index] for index in content)
            for index in content:
                leader[items[index]] = first
        return len(bins), kept_tokens(loads, bins)

    _walk_upwards(problem, pack)
    return measure_cuts(problem, leader), certain


def lower_bounds(problem: CutProblem) -> tuple[int, int]:
    """Lower bounds on the partitions and on the relayed tokens of any plan.

    A plan relays a token once for each partition below it, and the packings bound the number of these partitions.
    """

    def pack(loads: list[int], room: int, _: list[int]) -> tuple[int, int]:
        capacity = problem.capacity_tokens
        if len(loads) > EXACT_LOADS:
            return bound_bins(loads, room, capacity)
        bins, _proven = pack_loads(loads, room, capacity)
        return len(bins), kept_tokens(loads, bins)

    partitions, relayed_tokens = _walk_upwards(problem, pack)
    return max(partitions, -(-problem.start[-1] // problem.capacity_tokens)), relayed_tokens


def least_depth(problem: CutProblem, relayed_tokens: int) -> int:
    """Lower bound on the depth of a plan that relays this many tokens: each path by itself, filled from its root."""
    capacity = problem.capacity_tokens
    reached: list[tuple[int, int]] = []
    for item, above in enumerate(problem.parent):
        level, filled = reached[above] if above >= 0 else (1, 0)
        length = problem.length[item]
        if filled + length > capacity and length <= capacity:
            level, filled = level + 1, 0
        cuts = (filled + length - 1) // capacity
        reached.append((level + cuts, filled + length - cuts * capacity))
    return max([1 + (relayed_tokens > 0), *(level for level, _ in reached)]) if reached else 0


def _walk_upwards(problem: CutProblem, pack: Callable[[list[int], int, list[int]], tuple[int, int]]) -> tuple[int, int]:
    """Partitions and relayed tokens; ``pack(loads, room, items)`` returns (bins, tokens kept) of an item's children."""
    items, capacity = len(problem.length), problem.capacity_tokens
    top, hanging = [0] * items, [0] * items
    relayed_tokens = 0
    for item in range(items - 1, -1, -1):
        bins, kept, length = 0, 0, problem.length[item]
        if problem.children[item]:
            loads = [top[child] for child in problem.children[item]]
            bins, kept = pack(loads, room_below(length, capacity), problem.children[item])
        below = bins + sum(hanging[child] for child in problem.children[item])
        inner, top[item] = split_chain(length, kept, capacity)
        hanging[item] = below + inner
        relayed_tokens += below * length + inner * top[item] + capacity * (inner * (inner - 1) // 2)
    bins, _ = pack([top[root] for root in problem.roots], 0, problem.roots)
    return bins + sum(hanging[root] for root in problem.roots), relayed_tokens
