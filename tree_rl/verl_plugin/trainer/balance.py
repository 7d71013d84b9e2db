"""Which rank and which mini-batch a prompt's group trains in: groups stay whole, costs even out.

verl hands each rank an equal, contiguous share of the batch and cuts mini-batches of equal row counts from it. A cell
is what one rank trains in one step; padding rows fill every cell up to the same number of rows.
Legend: B rows, G groups, D ranks, C cells per rank, R rows per cell.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORK_PER_TOKEN = 24576
"""Work of one token's matrix products where a visible pair has work 2: the scale of verl's `calculate_workload`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchLayout:
    """The order of the rows in the batch, rank after rank and cell after cell."""

    order: np.ndarray
    """int64 [D * C * R], row of each slot; values from B on are padding rows, each used once."""
    num_rows: int
    """B, rows that are not padding."""
    rows_per_cell: int
    """R."""
    load_DC: np.ndarray
    """float64 [D, C], cost of each cell."""

    @property
    def imbalance(self) -> float:
        """Time of the slowest rank of every cell over the mean of all ranks; 1 is perfect."""
        mean = self.load_DC.mean(axis=0).sum()
        return float(self.load_DC.max(axis=0).sum() / mean) if mean else 1.0

    def rows_of_rank(self) -> list[list[int]]:
        """D lists of the real rows that each rank trains."""
        per_rank = self.order.reshape(self.load_DC.shape[0], -1)
        return [[int(row) for row in slots if row < self.num_rows] for slots in per_rank]


def workload(unique_tokens: np.ndarray | float, pairs: np.ndarray | float) -> np.ndarray:
    """Cost of running unique tokens that see the given number of (query, key) pairs.

    For one row of L tokens it is verl's own `calculate_workload`, so that trees and rows are weighed alike.
    """
    return np.asarray(WORK_PER_TOKEN * np.asarray(unique_tokens, dtype=np.float64) + 2.0 * np.asarray(pairs))


def mini_batch_count(num_groups: int, groups_per_mini_batch: int) -> int:
    """Optimizer steps of one epoch: it depends on prompts, never on how many rows their rollouts branched into."""
    return max(1, math.ceil(num_groups / groups_per_mini_batch))


def number_groups(uids: Sequence[str]) -> np.ndarray:
    """int64 [B], groups numbered in the order in which they first appear."""
    number: dict[str, int] = {}
    return np.array([number.setdefault(uid, len(number)) for uid in uids], dtype=np.int64)


def lay_out_groups(group_of_row: np.ndarray, cost_G: np.ndarray, *, num_ranks: int, num_cells: int) -> BatchLayout:
    """Give every group a rank and a cell.

    Cells take groups in the order of the batch, so that the make-up of a mini-batch does not depend on lengths. Within
    a cell the costliest group goes first to the least loaded rank, ties to the rank with the least work so far.

    Args:
        group_of_row: int [B], group of each row, numbered 0 to G - 1.
        cost_G: float [G], cost of each group.
        num_ranks: D, data-parallel ranks.
        num_cells: C, cells of each rank.

    Returns:
        The layout; a rank may have cells with padding rows alone.

    Raises:
        ValueError: no rows, a group without rows or without a cost.
    """
    num_groups = len(cost_G)
    rows_of_group = (
        np.bincount(group_of_row, minlength=num_groups) if len(group_of_row) else np.zeros(0, dtype=np.int64)
    )
    if len(group_of_row) == 0 or len(rows_of_group) != num_groups or not rows_of_group.all():
        raise ValueError(f"expected rows for each of {num_groups} groups, received {rows_of_group.tolist()} rows")
    rank_of_group, cell_of_group, load_DC = _place(np.asarray(cost_G, dtype=np.float64), num_ranks, num_cells)
    place_of_row = (rank_of_group * num_cells + cell_of_group)[group_of_row]
    rows_of_place = np.bincount(place_of_row, minlength=num_ranks * num_cells)
    rows_per_cell = int(rows_of_place.max())
    order = np.full(num_ranks * num_cells * rows_per_cell, -1, dtype=np.int64)
    # Rows of one group stay neighbours, in the order of the batch.
    sorted_rows = np.lexsort((np.arange(len(group_of_row)), group_of_row, place_of_row))
    first = np.concatenate(([0], np.cumsum(rows_of_place)[:-1]))
    rank_in_place = np.arange(len(sorted_rows)) - first[place_of_row[sorted_rows]]
    order[place_of_row[sorted_rows] * rows_per_cell + rank_in_place] = sorted_rows
    empty = order < 0
    order[empty] = len(group_of_row) + np.arange(empty.sum())
    return BatchLayout(order=order, num_rows=len(group_of_row), rows_per_cell=rows_per_cell, load_DC=load_DC)


def _place(cost_G: np.ndarray, num_ranks: int, num_cells: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank and cell of each group, int64 [G] both, and the load float64 [D, C]."""
    num_groups = len(cost_G)
    cell_end = (np.arange(1, num_cells + 1) * num_groups) // num_cells
    cell_of_group = np.searchsorted(cell_end, np.arange(num_groups), side="right")
    rank_of_group = np.zeros(num_groups, dtype=np.int64)
    load_DC = np.zeros((num_ranks, num_cells))
    total_D = np.zeros(num_ranks)
    for cell in range(num_cells):
        groups = np.flatnonzero(cell_of_group == cell)
        for group in groups[np.argsort(-cost_G[groups], kind="stable")]:
            rank = int(np.lexsort((np.arange(num_ranks), total_D, load_DC[:, cell]))[0])
            rank_of_group[group] = rank
            load_DC[rank, cell] += cost_G[group]
            total_D[rank] += cost_G[group]
    return rank_of_group, cell_of_group, load_DC
