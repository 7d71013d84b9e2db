"""Gives every prompt's group a rank and a mini-batch: groups stay whole, and their costs even out over the ranks.

verl hands each rank an equal, contiguous share of the batch and cuts it into mini-batches of equally many rows. A cell
is what one rank trains in one optimizer step; padding rows fill all cells to the same number of rows.
Legend: B rows, G groups, D ranks, C cells per rank, R rows per cell.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.bins import least_loaded
from tree_rl.tree.cost import ModelShape
from tree_rl.tree.forest import Forest


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOverlap:
    """What the rows of one prompt's group share."""

    unique_tokens: int
    """Tokens that the group's trees compute."""
    flat_tokens: int
    """Tokens of its rows."""
    cost: float
    """Floating point operations of one update on the trees."""
    depth: int
    """Tokens of the longest row."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchLayout:
    """The order of the rows in the batch, rank after rank and cell after cell."""

    order: np.ndarray
    """int64 [D * C * R], row of each slot; each value from B on names a padding row."""
    num_rows: int
    """B, without padding rows."""
    load_DC: np.ndarray
    """float64 [D, C], cost of each cell."""

    @property
    def imbalance(self) -> float:
        """Time of the slowest rank of every cell over the mean of all ranks; 1 is perfect."""
        mean = self.load_DC.mean(axis=0).sum()
        return float(self.load_DC.max(axis=0).sum() / mean) if mean else 1.0


def number_groups(uids: Sequence[str]) -> np.ndarray:
    """int64 [B], groups numbered in the order in which they first appear."""
    number: dict[str, int] = {}
    return np.array([number.setdefault(uid, len(number)) for uid in uids], dtype=np.int64)


def mini_batch_count(num_groups: int, groups_per_mini_batch: int) -> int:
    """Optimizer steps of one epoch; it depends on the number of prompts, not on how often rollouts branched."""
    return max(1, math.ceil(num_groups / groups_per_mini_batch))


def measure_groups(group_of_row: np.ndarray, row_tokens: Sequence[np.ndarray], shape: ModelShape) -> list[GroupOverlap]:
    """Overlap and cost of each of G groups; `group_of_row` is int [B], from 0 to G - 1, `row_tokens` B arrays."""
    members: list[list[np.ndarray]] = [[] for _ in range(int(group_of_row.max()) + 1)]
    for group, tokens in zip(group_of_row, row_tokens, strict=True):
        members[group].append(tokens)
    forests = [Forest.from_rows(rows) for rows in members]
    return [
        GroupOverlap(
            unique_tokens=forest.num_unique,
            flat_tokens=forest.num_flat,
            cost=shape.cost.forest(forest),
            depth=int(forest.row_index.lengths.max()),
        )
        for forest in forests
    ]


def lay_out_groups(group_of_row: np.ndarray, cost_G: np.ndarray, *, num_ranks: int, num_cells: int) -> BatchLayout:
    """Give every group a rank and a cell.

    Cells take groups in batch order, so lengths do not decide which groups share a mini-batch. Within a cell the
    costliest group goes first, to the rank with the least work in the cell, on a tie to the one with the least overall.
    Some cells may hold padding rows only.

    Args:
        group_of_row: int [B], from 0 to G - 1.
        cost_G: float [G].
        num_ranks: D.
        num_cells: C.

    Raises:
        ValueError: no rows, a group without rows or without a cost.
    """
    num_groups = len(cost_G)
    rows_of_group = np.bincount(group_of_row, minlength=num_groups)
    if len(group_of_row) == 0 or len(rows_of_group) != num_groups or not rows_of_group.all():
        raise ValueError(f"expected rows for each of {num_groups} groups, received {rows_of_group.tolist()} rows")
    place_of_group = np.zeros(num_groups, dtype=np.int64)
    load_DC = np.zeros((num_ranks, num_cells))
    first_groups = np.arange(1, num_cells) * num_groups // num_cells
    for cell, groups in enumerate(np.split(np.arange(num_groups), first_groups)):
        for rank, content in enumerate(least_loaded(cost_G[groups], num_ranks, earlier=load_DC.sum(axis=1))):
            place_of_group[groups[content]] = rank * num_cells + cell
            load_DC[rank, cell] = cost_G[groups[content]].sum()
    place_of_row = place_of_group[group_of_row]
    rows_per_cell = int(np.bincount(place_of_row).max())
    by_group = np.argsort(group_of_row, kind="stable")
    padding = itertools.count(len(group_of_row))
    order: list[int] = []
    for place in range(num_ranks * num_cells):
        rows = by_group[place_of_row[by_group] == place].tolist()
        order += rows + list(itertools.islice(padding, rows_per_cell - len(rows)))
    return BatchLayout(order=np.array(order, dtype=np.int64), num_rows=len(group_of_row), load_DC=load_DC)
