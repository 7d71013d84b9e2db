"""Which subtrees below one token stay with it, and how the others share partitions: bin packing at one cut.

Fewest bins first, then least kept. A bin holds at most C tokens, the partition of the token itself has room for A.
Legend: k loads.
"""

from bisect import bisect_left, insort

import numpy as np

EXACT_LOADS = 7
"""Most loads packed by trying every subset: below a millisecond."""

Bins = list[list[int]]


def pack_loads(loads: list[int], room_tokens: int, capacity_tokens: int) -> tuple[Bins, bool]:
    """Choose the loads that leave, and their bins.

    Args:
        loads: tokens of each of k subtrees, at most C each.
        room_tokens: A, most tokens that may stay.
        capacity_tokens: C, most tokens of a bin.

    Returns:
        Bins of indices into the loads (an index in no bin stays), and whether no choice has fewer bins, or as many
        bins and less kept.
    """
    if sum(loads) <= room_tokens:
        return [], True
    if len(loads) <= EXACT_LOADS:
        return _try_all(loads, room_tokens, capacity_tokens), True
    bound, least_kept = bound_bins(loads, room_tokens, capacity_tokens)
    bins = _fewest_best_fit(loads, room_tokens, capacity_tokens, bound)
    kept = sum(loads) - sum(loads[index] for content in bins for index in content)
    return bins, (len(bins), kept) == (bound, least_kept)


def bound_bins(loads: list[int], room_tokens: int, capacity_tokens: int) -> tuple[int, int]:
    """A lower bound on (bins, tokens kept), compared in that order: Martello and Toth's L2 for the bins.

    Args:
        loads: as in ``pack_loads``; the token's own partition counts as a bin filled up to its room.
        room_tokens: A.
        capacity_tokens: C.

    Returns:
        Bins and tokens kept.
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
    """Over subsets: fewest bins, and the least fill of the last, of every set that leaves."""
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
    """Best fit decreasing into so many bins that the rest has room; bisects the number of bins."""
    largest_first = sorted(range(len(loads)), key=lambda index: (-loads[index], index))
    low, high = at_least, len(loads)
    found = [[index] for index in largest_first]
    while low <= high:
        middle = low if low == at_least else (low + high) // 2
        bins = _best_fit(largest_first, loads, middle, capacity_tokens)
        left_over = sum(loads) - sum(loads[index] for content in bins for index in content)
        if left_over <= room_tokens:
            found, high = [content for content in bins if content], middle - 1
        else:
            low = middle + 1
    return found


def _best_fit(largest_first: list[int], loads: list[int], num_bins: int, capacity_tokens: int) -> Bins:
    bins: Bins = [[] for _ in range(num_bins)]
    room = [(capacity_tokens, number) for number in range(num_bins)]
    for index in largest_first:
        place = bisect_left(room, (loads[index], 0))
        if place < len(room):
            left, number = room.pop(place)
            bins[number].append(index)
            insort(room, (left - loads[index], number))
    return bins
