"""Micro-batches of at most ``max_tokens`` unique tokens that hold whole groups of rows.

A group beyond the budget is none of packing's business: it runs in partitions (`tree_rl.tree.partition`).
Legend: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.order import RowOrder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Rows that run in one forward."""

    rows: np.ndarray
    """int64, row indices, ascending."""
    unique_tokens: int
    """Unique tokens of these rows together: the length of the forward."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Micro-batches of a set of groups."""

    micro_batches: tuple[MicroBatch, ...]
    """Every row of every group exactly once; most tokens first."""

    @property
    def unique_tokens(self) -> int:
        """Tokens of all forwards together."""
        return sum(batch.unique_tokens for batch in self.micro_batches)


def pack_groups(forest: Forest, groups: Sequence[Sequence[int] | np.ndarray], *, max_tokens: int) -> Packing:
    """Pack groups into few micro-batches of similar size.

    Args:
        forest: the forest of all rows.
        groups: row indices of each group (a prompt's rows, or a tree); no row may appear twice. Empty groups are
            skipped.
        max_tokens: budget in unique tokens.

    Returns:
        The micro-batches; none when there are no rows.

    Raises:
        ValueError: a budget below 1, a row in two groups, a group beyond the budget.
        IndexError: a row that does not exist.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1 unique token, received {max_tokens}")
    members = [np.asarray(group, dtype=np.int64) for group in groups]
    _check_rows(members, forest.num_rows)
    members = [rows for rows in members if len(rows)]
    order = forest.row_order
    rank_of_row = np.argsort(order.rows)
    sizes = [order.take(np.sort(rank_of_row[rows])).num_unique for rows in members]
    for rows, size in zip(members, sizes, strict=True):
        if size > max_tokens:
            raise ValueError(
                f"the group of row {rows.min()} has {size} unique tokens, expected at most max_tokens={max_tokens}; "
                "run it in partitions (tree_rl.tree.partition.plan_partitions)"
            )
    bins = fill_bins(sizes, max_tokens)
    batches = [_joined([members[index] for index in content], order, rank_of_row) for content in bins]
    return Packing(
        micro_batches=tuple(sorted(batches, key=lambda batch: (-batch.unique_tokens, int(batch.rows[0])))),
    )


def _check_rows(groups: list[np.ndarray], num_rows: int) -> None:
    rows = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
    if rows.size and not 0 <= rows.min() <= rows.max() < num_rows:
        wrong = rows[(rows < 0) | (rows >= num_rows)][0]
        raise IndexError(f"groups: expected rows in [0, {num_rows}), received {wrong}")
    values, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"groups: expected each row once, but row {values[np.argmax(counts)]} appears again")


def fill_bins(sizes: list[int], capacity: int) -> list[list[int]]:
    """Items by index in few bins: as many as best fit decreasing needs, evened out where that fits.

    Args:
        sizes: of the items; one beyond the capacity gets a bin of its own.
        capacity: of a bin.
    """
    largest_first = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    tight = _best_fit(largest_first, sizes, capacity)
    even = _least_loaded(largest_first, sizes, len(tight))
    if all(sum(sizes[index] for index in content) <= capacity for content in even):
        return even
    return tight


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


def _joined(groups: list[np.ndarray], order: RowOrder, rank_of_row: np.ndarray) -> MicroBatch:
    """Groups in one micro-batch; a prefix that they share runs once."""
    rows = np.sort(np.concatenate(groups))
    return MicroBatch(rows=rows, unique_tokens=order.take(np.sort(rank_of_row[rows])).num_unique)
