"""Greedy bin packing, and with it whole groups of rows in forwards of at most ``max_tokens`` unique tokens.

A group beyond the budget runs in partitions instead (`tree_rl.tree.partition`).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from tree_rl.tree.forest import Forest

Bins = list[list[int]]
"""For each bin, the indices of the items in it."""


def pack_groups(
    forest: Forest, groups: Sequence[Sequence[int] | np.ndarray], *, max_tokens: int
) -> tuple[np.ndarray, ...]:
    """Pack groups into few forwards of similar size.

    Args:
        forest: the forest of all rows.
        groups: row indices of each group (a prompt's rows, or a tree), each row at most once. Empty groups are skipped.
        max_tokens: budget in unique tokens.

    Returns:
        The rows of each forward, int64 ascending, those with most unique tokens first; together every row once.

    Raises:
        ValueError: the budget is below 1, or a group is beyond it.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1 unique token, received {max_tokens}")
    members = [np.asarray(group, dtype=np.int64) for group in groups if len(group)]
    order = forest.row_order
    rank_of_row = np.argsort(order.rows)

    def unique_tokens(rows: np.ndarray) -> int:
        return order.take(np.sort(rank_of_row[rows])).num_unique

    sizes = [unique_tokens(rows) for rows in members]
    for rows, size in zip(members, sizes, strict=True):
        if size > max_tokens:
            raise ValueError(
                f"the group of row {rows.min()} has {size} unique tokens, expected at most max_tokens={max_tokens}; "
                "run it in partitions (tree_rl.tree.partition.plan_partitions)"
            )
    packed = [np.sort(np.concatenate([members[index] for index in bin_])) for bin_ in fill_bins(sizes, max_tokens)]
    # Not by the sum of the sizes: a prefix that groups share runs once.
    return tuple(sorted(packed, key=lambda rows: (-unique_tokens(rows), int(rows[0]))))


def fill_bins(sizes: list[int], capacity: int) -> Bins:
    """As many bins as best fit needs, balanced if that still fits; an item beyond the capacity gets a separate bin."""
    tight = best_fit(sizes, capacity)
    even = least_loaded(sizes, len(tight))
    fits = all(sum(sizes[index] for index in content) <= capacity for content in even)
    return even if fits else tight


def best_fit(sizes: Sequence[int], capacity: int, *, most_bins: int | None = None) -> Bins:
    """Best-fit decreasing: largest item first, each into the fullest bin that has room for it.

    An item larger than the capacity gets a separate bin. With `most_bins`, items that do not fit into that many bins
    stay unpacked; None opens as many bins as needed.
    """
    bins: Bins = []
    room: list[tuple[int, int]] = []
    for index in largest_first(sizes):
        place = bisect_left(room, (sizes[index], 0))
        if place < len(room):
            left, number = room.pop(place)
        elif most_bins is None or len(bins) < most_bins:
            left, number = capacity, len(bins)
            bins.append([])
        else:
            continue
        bins[number].append(index)
        insort(room, (left - sizes[index], number))
    return bins


def least_loaded(sizes: Sequence[float] | np.ndarray, num_bins: int) -> Bins:
    """Largest item first, each into the bin with the least load; some bins may stay empty."""
    bins: Bins = [[] for _ in range(num_bins)]
    load = [(0.0, number) for number in range(num_bins)]
    for index in largest_first(sizes):
        least, chosen = load[0]
        bins[chosen].append(index)
        heapreplace(load, (least + sizes[index], chosen))
    return bins


def largest_first(sizes: Sequence[float] | np.ndarray) -> list[int]:
    """Indices by decreasing size; equal sizes keep their order."""
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])
