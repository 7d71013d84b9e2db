"""What other columns would make of the groups."""

from dataclasses import dataclass

import numpy as np

from tree_rl.inspection.recording import Recording
from tree_rl.tree import Forest

MOST = 6
"""Columns that are tried."""
KEPT = 0.5
"""Share of the rows that a likely column keeps with the rows that begin most alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped:
    """The rows in the groups of another column."""

    column: str
    groups: int
    por: float
    """Potential overlap ratio."""


def regroup(recording: Recording) -> list[Regrouped]:
    """The rows by each column that could name the group; none where the file names it.

    Likely ones first: those that keep most rows with the rows that begin most alike, as a number of the call within a
    run does not; then those with many groups of at least two rows. The one with the most promises the least.
    """
    tokens, current = [row.token_ids for row in recording.rows], [row.group for row in recording.rows]
    found = []
    for column, values in recording.labels.items():
        groups = len(set(values))
        is_current = groups == len(set(current)) == len(set(zip(values, current, strict=True)))
        # One group of all rows, or one for each row, says nothing about prompts.
        if 1 < groups < len(values) and not is_current:
            found.append((2 * groups > len(current), -groups, column, values))
    if not found:
        return []
    nearest = _shared(Forest.from_rows(tokens))
    tried = []
    for is_fine, groups, column, values in sorted(found, key=lambda one: one[:2])[:MOST]:
        forest = Forest.from_rows(tokens, merge_key=values)
        keeps = float(np.mean(_shared(forest) == nearest))
        por = 1 - forest.num_unique / forest.num_flat
        tried.append((keeps < KEPT, is_fine, groups, Regrouped(column=column, groups=-groups, por=por)))
    return [one[-1] for one in sorted(tried, key=lambda one: one[:3])]


def _shared(forest: Forest) -> np.ndarray:
    """int64 [B], most tokens that each row shares with another row."""
    order = forest.row_order
    most = np.zeros(len(order.rows), dtype=np.int64)
    most[order.rows] = np.maximum(order.shared, np.append(order.shared[1:], 0))
    return most
