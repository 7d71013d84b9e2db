"""Packs the k subtrees below a cut token into partitions, exactly where k is small.

A bin is a new partition of at most C tokens. A subtree in no bin stays in the partition of the cut token, which has
room for A tokens. The fewest bins win, then the fewest tokens that stay.
"""

import numpy as np

from tree_rl.tree.packing import Bins, best_fit

EXACT_LOADS = 7
"""Most loads for which all subsets are tried; that takes less than a millisecond."""


def pack_loads(loads: list[int], room_tokens: int, capacity_tokens: int) -> tuple[Bins, bool]:
    """Choose which subtrees leave a cut token's partition, and pack them into bins.

    Args:
        loads: tokens of each of k subtrees, at most C each.
        room_tokens: A, most tokens that may stay.
        capacity_tokens: C, most tokens of a bin.

    Returns:
        Bins of indices into `loads`, and whether the choice is proven best.
    """
    if sum(loads) <= room_tokens:
        return [], True
    if len(loads) <= EXACT_LOADS:
        return _try_all(loads, room_tokens, capacity_tokens), True
    bound, least_kept = bound_bins(loads, room_tokens, capacity_tokens)
    bins = _fewest_best_fit(loads, room_tokens, capacity_tokens, bound)
    return bins, (len(bins), kept_tokens(loads, bins)) == (bound, least_kept)


def kept_tokens(loads: list[int], bins: Bins) -> int:
    """Tokens of the loads that stay: those in no bin."""
    return sum(loads) - sum(loads[index] for content in bins for index in content)


def bound_bins(loads: list[int], room_tokens: int, capacity_tokens: int) -> tuple[int, int]:
    """Lexicographic lower bound on (bins, tokens kept) of `pack_loads`; Martello and Toth's L2 for the bins.

    The cut token's partition counts as one more bin that is already filled up to its room.
    """
    total = sum(loads)
    if total <= room_tokens:
        return 0, total
    filled = [load for load in (*loads, capacity_tokens - room_tokens) if load]
    sizes = np.sort(np.array(filled, dtype=np.int64))
    sums = np.concatenate(([0], np.cumsum(sizes)))
    thresholds = np.unique(np.concatenate(([0], sizes[2 * sizes <= capacity_tokens])))
    half = np.searchsorted(sizes, capacity_tokens // 2, side="right")
    small = np.searchsorted(sizes, thresholds)
    alone = np.searchsorted(sizes, capacity_tokens - thresholds, side="right")
    spare = (alone - half) * capacity_tokens - (sums[alone] - sums[half])
    overflow = np.maximum(0, -(-(sums[half] - sums[small] - spare) // capacity_tokens))
    bins = int((len(sizes) - half + overflow).max()) - 1
    return bins, max(0, total - bins * capacity_tokens)


def _try_all(loads: list[int], room_tokens: int, capacity_tokens: int) -> Bins:
    """Dynamic programme over subsets: for each set that leaves, the fewest bins and the least fill of the last bin."""
    size = len(loads)
    best = [(0, capacity_tokens)] + [(size + 1, 0)] * ((1 << size) - 1)
    last = [0] * (1 << size)
    sums = [0] * (1 << size)
    choice, chosen = (size + 1, 0), 0
    everything = sum(loads)
    for subset in range(1 << size):
        for index in range(size):
            if not subset >> index & 1:
                continue
            bins, fill = best[subset ^ 1 << index]
            fits = fill + loads[index] <= capacity_tokens
            packed = (bins, fill + loads[index]) if fits else (bins + 1, loads[index])
            if packed < best[subset]:
                best[subset], last[subset] = packed, index
            sums[subset] = sums[subset ^ 1 << index] + loads[index]
        kept = everything - sums[subset]
        if kept <= room_tokens and (best[subset][0], kept) < choice:
            choice, chosen = (best[subset][0], kept), subset
    bins_of: Bins = [[] for _ in range(choice[0])]
    while chosen:
        bins_of[best[chosen][0] - 1].append(last[chosen])
        chosen ^= 1 << last[chosen]
    return bins_of


def _fewest_best_fit(loads: list[int], room_tokens: int, capacity_tokens: int, at_least: int) -> Bins:
    """Best fit with the fewest bins for which the remaining loads fit into the room; bisects the number of bins."""
    low, high = at_least, len(loads)
    found = [[index] for index in range(len(loads))]
    while low <= high:
        middle = low if low == at_least else (low + high) // 2
        bins = best_fit(loads, capacity_tokens, most_bins=middle)
        if kept_tokens(loads, bins) <= room_tokens:
            found, high = bins, middle - 1
        else:
            low = middle + 1
    return found
