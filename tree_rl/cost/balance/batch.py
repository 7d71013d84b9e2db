"""Assigns every prompt's group to a mini-batch and every row to a rank.

verl gives each rank an equal, contiguous share of the batch and cuts it into mini-batches with equal numbers of rows.
A cell holds what one rank trains in one optimizer step; padding rows fill all cells to the same number of rows.
Legend: B rows, G groups, D data-parallel ranks, C cells per rank, R rows per cell.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.cost.balance.cell_layout import MOST_TRIALS, lay_out_cell
from tree_rl.cost.balance.paths import GroupPaths
from tree_rl.cost.cost_model import CostModel
from tree_rl.tree.forest import Forest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchLayout:
    """The order of the rows in the batch, rank by rank and cell by cell."""

    order: np.ndarray
    """int64 [D * C * R], row of each slot; values of B and above are padding rows."""
    num_rows: int
    """B, without padding rows."""
    load_DC: np.ndarray
    """float64 [D, C], predicted cost of each cell."""
    tokens_DC: np.ndarray
    """int64 [D, C], unique tokens of each cell without padding rows."""
    bound_C: np.ndarray
    """float64 [C], lower bound on the cost of the slowest rank."""
    split_groups: int
    """Number of groups whose rows are on several ranks."""
    repeated_tokens: int
    """Tokens that are computed again because their group is split over ranks."""

    @property
    def imbalance(self) -> float:
        """Predicted time with the slowest rank in each cell, over the mean of all ranks; 1 is perfect."""
        mean = self.load_DC.mean(axis=0).sum()
        return float(self.load_DC.max(axis=0).sum() / mean) if mean else 1.0

    @property
    def least_imbalance(self) -> float:
        """Lower bound on the imbalance of any layout, relative to the same mean."""
        mean = self.load_DC.mean(axis=0).sum()
        return float(self.bound_C.sum() / mean) if mean else 1.0


def number_groups(uids: Sequence[str]) -> np.ndarray:
    """int64 [B], group of each row, numbered in order of first appearance."""
    number: dict[str, int] = {}
    return np.array([number.setdefault(uid, len(number)) for uid in uids], dtype=np.int64)


def mini_batch_count(num_groups: int, groups_per_mini_batch: int) -> int:
    """Optimizer steps per epoch; depends on the number of prompts, not on how often rollouts branched."""
    return max(1, math.ceil(num_groups / groups_per_mini_batch))


def paths_of_groups(group_of_row: np.ndarray, row_tokens: Sequence[np.ndarray], cost: CostModel) -> list[GroupPaths]:
    """The paths of each of G groups; `group_of_row` is int [B] in [0, G), `row_tokens` has B arrays."""
    members: list[list[np.ndarray]] = [[] for _ in range(int(group_of_row.max()) + 1)]
    for group, tokens in zip(group_of_row, row_tokens, strict=True):
        members[group].append(tokens)
    return [GroupPaths.of(Forest.from_rows(rows), cost) for rows in members]


def lay_out_groups(
    group_of_row: np.ndarray, paths: Sequence[GroupPaths], *, num_ranks: int, num_cells: int, multiple_of: int = 1
) -> BatchLayout:
    """Assign every group to a mini-batch and its rows to ranks.

    Mini-batches take groups in batch order, so row lengths do not decide which groups share one. Within a mini-batch
    `lay_out_cell` minimises the time of the slowest rank. The costliest part then goes to the rank with the least work
    so far. Some cells may hold padding rows only.

    Args:
        group_of_row: int [B] in [0, G).
        paths: paths of each of G groups.
        num_ranks: D.
        num_cells: C.
        multiple_of: the number of slots becomes a multiple of this; a role may split the batch into that many shares.

    Raises:
        ValueError: no rows, a group without rows, or paths that do not fit the group's rows.
    """
    num_groups = len(paths)
    rows_of_group = np.bincount(group_of_row, minlength=num_groups)
    if len(group_of_row) == 0 or rows_of_group.tolist() != [len(one.order.rows) for one in paths]:
        expected = [len(one.order.rows) for one in paths]
        raise ValueError(f"rows of {num_groups} groups: expected {expected} rows, received {rows_of_group.tolist()}")
    members = np.split(np.argsort(group_of_row, kind="stable"), np.cumsum(rows_of_group)[:-1])
    load_DC = np.zeros((num_ranks, num_cells))
    tokens_DC = np.zeros((num_ranks, num_cells), dtype=np.int64)
    rows_of_place: list[list[int]] = [[] for _ in range(num_ranks * num_cells)]
    first_groups = np.arange(1, num_cells) * num_groups // num_cells
    bound_C = np.zeros(num_cells)
    split_groups = 0
    for cell, groups in enumerate(np.split(np.arange(num_groups), first_groups)):
        layout = lay_out_cell([paths[group] for group in groups], num_ranks, trials=MOST_TRIALS // num_cells)
        split_groups += layout.split_groups
        bound_C[cell] = layout.bound
        ranks = np.argsort(load_DC.sum(axis=1), kind="stable")
        for rank, part in zip(ranks, np.argsort(-layout.load_D, kind="stable"), strict=True):
            load_DC[rank, cell] = layout.load_D[part]
            for index, rows in layout.rows[part]:
                rows_of_place[rank * num_cells + cell] += members[groups[index]][rows].tolist()
                whole = paths[groups[index]].order
                tokens_DC[rank, cell] += (whole.select(rows) if len(rows) < len(whole.rows) else whole).num_unique
    step = multiple_of // math.gcd(multiple_of, num_ranks * num_cells)
    rows_per_cell = math.ceil(max(map(len, rows_of_place)) / step) * step
    padding = itertools.count(len(group_of_row))
    order = [row for rows in rows_of_place for row in [*rows, *itertools.islice(padding, rows_per_cell - len(rows))]]
    return BatchLayout(
        order=np.array(order, dtype=np.int64),
        num_rows=len(group_of_row),
        load_DC=load_DC,
        tokens_DC=tokens_DC,
        bound_C=bound_C,
        split_groups=split_groups,
        repeated_tokens=int(tokens_DC.sum()) - sum(one.order.num_unique for one in paths),
    )
