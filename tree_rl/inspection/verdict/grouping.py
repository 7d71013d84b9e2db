"""What other columns would make of the groups."""

from dataclasses import dataclass

from tree_rl.inspection.recording import Recording
from tree_rl.tree import Forest

MOST = 6
"""Columns that are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regrouped:
    """The rows in the groups of another column."""

    column: str
    groups: int
    por: float
    """Potential overlap ratio."""


def regroup(recording: Recording) -> list[Regrouped]:
    """The rows by each column that could name the group; none where the file names it.

    Likely ones first: those with many groups of at least two rows. The one with the most promises the least.
    """
    current = [row.group for row in recording.rows]
    found = []
    for column, values in recording.labels.items():
        groups = len(set(values))
        is_current = groups == len(set(current)) == len(set(zip(values, current, strict=True)))
        # One group of all rows, or one for each row, says nothing about prompts.
        if 1 < groups < len(values) and not is_current:
            found.append((groups, column, values))
    tried = []
    for groups, column, values in sorted(found, key=lambda one: (2 * one[0] > len(current), -one[0]))[:MOST]:
        forest = Forest.from_rows([row.token_ids for row in recording.rows], merge_key=values)
        tried.append(Regrouped(column=column, groups=groups, por=1 - forest.num_unique / forest.num_flat))
    return tried
