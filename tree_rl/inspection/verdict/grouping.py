"""Tries other columns as the group of the rows."""

from dataclasses import dataclass

import numpy as np

from tree_rl.inspection.recording import Recording
from tree_rl.tree import Forest

MOST = 6
"""Most columns that are tried."""
KEPT = 0.5
"""Least share of rows that a likely column leaves in one group with the row of the longest common prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped:
    """The rows grouped by another column."""

    column: str
    groups: int
    por: float
    """Potential overlap ratio."""


def regroup(recording: Recording) -> list[Regrouped]:
    """The rows grouped by each column that could name the group, likely columns first; none if the file names it.

    Columns that leave most rows together with the row of their longest common prefix come first, unlike for example
    the number of a call within a run. Then come columns with at least two rows per group on average, then more groups:
    more groups promise less.
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
        tried.append((keeps < KEPT, is_fine, groups, Regrouped(column=column, groups=-groups, por=forest.por)))
    return [one[-1] for one in sorted(tried, key=lambda one: one[:3])]


def _shared(forest: Forest) -> np.ndarray:
    """int64 [B], length of the longest prefix that each row shares with another row."""
    order = forest.row_order
    most = np.zeros(len(order.rows), dtype=np.int64)
    most[order.rows] = np.maximum(order.shared, np.append(order.shared[1:], 0))
    return most
