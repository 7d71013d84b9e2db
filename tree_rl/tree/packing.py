"""Packs whole groups of rows into forwards of at most ``max_tokens`` unique tokens.

A group beyond the budget runs in partitions instead (`tree_rl.tree.partition`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.bins import Bins, best_fit, least_loaded
from tree_rl.tree.forest import Forest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedGroups:
    """Groups that run in one forward."""

    rows: np.ndarray
    """int64, row indices, ascending."""
    unique_tokens: int
    """Length of the forward: the unique tokens of these rows."""


def pack_groups(
    forest: Forest, groups: Sequence[Sequence[int] | np.ndarray], *, max_tokens: int
) -> tuple[PackedGroups, ...]:
    """Pack groups into few forwards of similar size.

    Args:
        forest: the forest of all rows.
        groups: row indices of each group (a prompt's rows, or a tree); no row may appear twice. Empty groups are
            skipped.
        max_tokens: budget in unique tokens.

    Returns:
        The forwards, longest first; together they hold every row exactly once.

    Raises:
        ValueError: the budget is below 1, a row appears twice, or a group is beyond the budget.
        IndexError: a row does not exist.
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
    packed = []
    for content in bins:
        rows = np.sort(np.concatenate([members[index] for index in content]))
        # Not the sum of the sizes: a prefix that groups share runs once.
        unique_tokens = order.take(np.sort(rank_of_row[rows])).num_unique
        packed.append(PackedGroups(rows=rows, unique_tokens=unique_tokens))
    return tuple(sorted(packed, key=lambda one: (-one.unique_tokens, int(one.rows[0]))))


def _check_rows(groups: list[np.ndarray], num_rows: int) -> None:
    rows = np.concatenate(groups) if groups else np.empty(0, dtype=np.int64)
    if rows.size and not 0 <= rows.min() <= rows.max() < num_rows:
        wrong = rows[(rows < 0) | (rows >= num_rows)][0]
        raise IndexError(f"groups: expected rows in [0, {num_rows}), received {wrong}")
    values, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"groups: expected each row once, but row {values[np.argmax(counts)]} appears again")


def fill_bins(sizes: list[int], capacity: int) -> Bins:
    """As many bins as best fit needs, balanced if that still fits; an item beyond the capacity gets a separate bin."""
    tight = best_fit(sizes, capacity)
    even = least_loaded(sizes, len(tight))
    fits = all(sum(sizes[index] for index in content) <= capacity for content in even)
    return even if fits else tight
