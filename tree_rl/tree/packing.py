"""Micro-batches of at most ``max_tokens`` unique tokens that keep groups of rows whole.

A group over the budget is split along the depth-first order: its pieces repeat their common prefix.
Legend: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.row_order import RowOrder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Rows that run in one forward."""

    rows: np.ndarray
    """int64, row indices, ascending."""
    unique_tokens: int
    """Unique tokens of these rows together: the length of the forward."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Micro-batches, and what keeping to the budget has cost."""

    micro_batches: tuple[MicroBatch, ...]
    """Every row of every group exactly once; most tokens first."""
    repeated_tokens: int
    """Tokens that run more than once because groups were split: 0 when every group fits."""
    split_groups: tuple[int, ...]
    """Indices of the groups that were split."""
    oversized_rows: tuple[int, ...]
    """Rows that alone exceed the budget; each runs without any row but its own prefixes."""


def pack_groups(
    forest: Forest, groups: Sequence[Sequence[int] | np.ndarray], *, max_tokens: int, at_least: int = 1
) -> Packing:
    """Pack groups into few micro-batches of similar size.

    Args:
        forest: the forest of all rows.
        groups: row indices of each group (a prompt's rows, or a tree); no row may appear twice. Empty groups are
            skipped.
        max_tokens: budget in unique tokens.
        at_least: number of micro-batches wanted, as when all ranks must run equally many. Groups stay whole, so
            fewer come back when there are fewer pieces.

    Returns:
        The micro-batches; none when there are no rows.

    Raises:
        ValueError: a budget below 1, a row in two groups.
        IndexError: a row that does not exist.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1 unique token, received {max_tokens}")
    members = [np.asarray(group, dtype=np.int64) for group in groups]
    _check_rows(members, forest.num_rows)
    order = forest.row_order
    rank_of_row = np.argsort(order.rows)
    pieces: list[MicroBatch] = []
    split_groups: list[int] = []
    repeated_tokens = 0
    for number, rows in enumerate(members):
        if not len(rows):
            continue
        group = order.take(np.sort(rank_of_row[rows]))
        parts = split_rows(group, max_tokens)
        pieces += parts
        if len(parts) > 1:
            split_groups.append(number)
            repeated_tokens += sum(part.unique_tokens for part in parts) - group.num_unique
    bins = _fill_bins([piece.unique_tokens for piece in pieces], max_tokens, at_least)
    batches = [_joined([pieces[index].rows for index in content], order, rank_of_row) for content in bins]
    lengths = forest.row_index.lengths
    return Packing(
        micro_batches=tuple(sorted(batches, key=lambda batch: (-batch.unique_tokens, int(batch.rows[0])))),
        repeated_tokens=repeated_tokens,
        split_groups=tuple(split_groups),
        oversized_rows=tuple(sorted(int(row) for rows in members for row in rows if lengths[row] > max_tokens)),
    )


def split_rows(order: RowOrder, max_tokens: int) -> list[MicroBatch]:
    """Cut a depth-first order of rows into runs within the budget, repeating as few tokens as possible.

    A cut before rank k repeats ``shared[k]`` tokens, so the best cuts are found exactly by dynamic programming over
    ranks; among equals the fewest pieces win.

    Args:
        order: rows of one group.
        max_tokens: budget in unique tokens. A single row may exceed it: then the row, with the rows that are its
            prefixes, is a piece.

    Returns:
        Runs of rows in depth-first order.
    """
    size = len(order.rows)
    if not size:
        return []
    added = np.cumsum(order.lengths - order.shared)
    # Scaling makes one comparison lexicographic: repeated tokens first, then pieces.
    cut_cost = order.shared * (size + 1) + 1
    best = np.zeros(size + 1, dtype=np.int64)
    begin = np.zeros(size + 1, dtype=np.int64)
    first = 0
    for end in range(1, size + 1):
        limit = max(max_tokens, int(order.lengths[end - 1]))
        while _run_tokens(order, added, first, end) > limit:
            first += 1
        costs = best[first:end] + cut_cost[first:end]
        choice = first + int(np.argmin(costs))
        best[end], begin[end] = costs[choice - first], choice
    pieces = []
    end = size
    while end:
        start = int(begin[end])
        tokens = _run_tokens(order, added, start, end)
        pieces.append(MicroBatch(rows=np.sort(order.rows[start:end]), unique_tokens=tokens))
        end = start
    return pieces[::-1]


def _run_tokens(order: RowOrder, added: np.ndarray, start: int, end: int) -> int:
    """Unique tokens of ranks [start, end): what they add, and the prefix that the first would have shared."""
    return int(order.lengths[start] + added[end - 1] - added[start])


def _check_rows(groups: list[np.ndarray], num_rows: int) -> None:
    rows = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
    if rows.size and not 0 <= rows.min() <= rows.max() < num_rows:
        wrong = rows[(rows < 0) | (rows >= num_rows)][0]
        raise IndexError(f"groups: expected rows in [0, {num_rows}), received {wrong}")
    values, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"groups: expected each row once, but row {values[np.argmax(counts)]} appears again")


def _fill_bins(sizes: list[int], capacity: int, at_least: int) -> list[list[int]]:
    """Pieces by index in few bins: the fewest that best fit decreasing finds, then evened out where that fits."""
    largest_first = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    alone = [[index] for index in largest_first if sizes[index] > capacity]
    rest = largest_first[len(alone) :]
    tight = _best_fit(rest, sizes, capacity)
    wanted = min(max(len(tight), at_least - len(alone)), len(rest))
    even = _least_loaded(rest, sizes, wanted)
    if all(sum(sizes[index] for index in content) <= capacity for content in even):
        return alone + even
    while len(tight) < wanted:
        fullest = max((content for content in tight if len(content) > 1), key=lambda c: sum(sizes[i] for i in c))
        tight.remove(fullest)
        tight += [fullest[::2], fullest[1::2]]
    return alone + tight


def _best_fit(largest_first: list[int], sizes: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in largest_first:
        fitting = [number for number, left in enumerate(room) if left >= sizes[index]]
        if fitting:
            chosen = min(fitting, key=room.__getitem__)
        else:
            chosen = len(bins)
            bins.append([])
            room.append(capacity)
        bins[chosen].append(index)
        room[chosen] -= sizes[index]
    return bins


def _least_loaded(largest_first: list[int], sizes: list[int], num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for index in largest_first:
        chosen = load.index(min(load))
        bins[chosen].append(index)
        load[chosen] += sizes[index]
    return bins


def _joined(pieces: list[np.ndarray], order: RowOrder, rank_of_row: np.ndarray) -> MicroBatch:
    """Pieces in one micro-batch; a prefix that they share runs once."""
    rows = np.sort(np.concatenate(pieces))
    return MicroBatch(rows=rows, unique_tokens=order.take(np.sort(rank_of_row[rows])).num_unique)
