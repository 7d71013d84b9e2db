"""A group's rows as paths, the units that move between ranks: the cost of each, and of the prefix that two share.

A token's cost depends only on its depth. So the cost of a set of rows follows from their lengths and from the prefixes
that neighbours in depth-first order share. Legend: B rows of the group, P paths.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.cost.cost_model import CostModel
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.order import RowOrder

MOST_PATHS = 128
"""Most paths of a group, because every move looks at all pairs of paths; more rows form runs of about equal cost."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupPaths:
    """Runs of rows that are neighbours in depth-first order. A row that is a prefix of the next one costs nothing."""

    order: RowOrder
    """The group's rows in depth-first order."""
    rows: tuple[np.ndarray, ...]
    """P int64 arrays, rows of each path."""
    alone_P: np.ndarray
    """float64 [P], cost of the forest of each path's rows."""
    shared_PP: np.ndarray
    """float64 [P, P], for u < v, cost of the prefix that paths u and v share if no path between them is present."""
    longest_row: float
    """Cost of the costliest row: a lower bound on the slowest rank, however the group is split."""

    @classmethod
    def of(cls, forest: Forest, cost: CostModel) -> "GroupPaths":
        """The paths of a group's forest of at least one row."""
        order = forest.row_order
        alone_B = cost.rows(order.lengths)
        shared_B = cost.rows(order.shared)
        own_B = alone_B - shared_B
        starts_B = _starts(order.lengths, order.shared, own_B)
        first_P = np.flatnonzero(starts_B)
        inner_B = np.where(starts_B, np.inf, shared_B)
        least_P = np.minimum.reduceat(inner_B, first_P)
        return cls(
            order=order,
            rows=tuple(np.split(order.rows, first_P[1:])),
            alone_P=np.add.reduceat(np.where(starts_B, alone_B, own_B), first_P),
            shared_PP=_shared(shared_B[first_P], least_P),
            longest_row=float(alone_B.max()),
        )

    @property
    def num_paths(self) -> int:
        """P, number of paths."""
        return len(self.alone_P)

    def cost(self, paths: np.ndarray) -> float:
        """Cost of the forest of some paths (int, ascending)."""
        return float(self.alone_P[paths].sum() - self.shared_PP[paths[:-1], paths[1:]].sum())

    @property
    def whole(self) -> float:
        """Cost of all rows on one rank."""
        return self.cost(np.arange(self.num_paths))


def _starts(lengths: np.ndarray, shared: np.ndarray, own_B: np.ndarray) -> np.ndarray:
    """bool [B]: rows that start a path; `own_B` is the cost that each row adds to those before it."""
    starts_B = np.ones(len(lengths), dtype=bool)
    starts_B[1:] = shared[1:] < lengths[:-1]
    if np.count_nonzero(starts_B) > MOST_PATHS:
        starts = np.flatnonzero(starts_B)
        run = (np.cumsum(own_B) - own_B)[starts] // (own_B.sum() / MOST_PATHS)
        starts_B[starts[1:]] = np.diff(run) > 0
    return starts_B


def _shared(before_P: np.ndarray, least_P: np.ndarray) -> np.ndarray:
    """`GroupPaths.shared_PP`, from what each path shares with the row before it and the least its rows share."""
    size = len(before_P)
    shared = np.zeros((size, size))
    for path in range(size - 1):
        between = np.minimum(before_P[path + 1 : -1], least_P[path + 1 : -1])
        bound = np.minimum.accumulate(np.concatenate([[np.inf], between]))
        shared[path, path + 1 :] = np.minimum(bound, before_P[path + 1 :])
    return shared
