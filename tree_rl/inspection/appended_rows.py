"""The rows that an appending trainer would store: a row that another row of its group continues is no row of its own.

verl's tool loop appends every call of an agent to one row, and so does our gateway (`rollout/transcript.py`).
"""

from dataclasses import replace

import numpy as np

from tree_rl.inspection.overlap_by_group import forest_of
from tree_rl.inspection.row import Row


def append_rows(rows: list[Row]) -> list[Row]:
    """Merge each row that is a strict prefix of another row of its group into one such row, in the order of `rows`.

    Like a call in the gateway, a row continues at most one row, the longest that is left: four equal rows need four
    longer rows to vanish. The longer row trains a token if either row trains it: its context is the same in both.
    """
    order = forest_of(rows).row_order
    stored: dict[int, Row] = {}
    prefixes: list[int] = []
    """Stored rows with which the current row starts, shortest first; rows come in depth-first order."""
    for index, shared in zip(order.rows.tolist(), order.shared.tolist(), strict=True):
        row = rows[index]
        while prefixes and len(rows[prefixes[-1]].token_ids) > shared:
            prefixes.pop()
        shorter = (one for one in reversed(prefixes) if len(rows[one].token_ids) < len(row.token_ids))
        continued = next(shorter, None)
        if continued is not None:
            prefixes.remove(continued)
            row = _appended(stored.pop(continued), row)
        stored[index] = row
        prefixes.append(index)
    return [stored[index] for index in sorted(stored)]


def _appended(before: Row, row: Row) -> Row:
    if before.trained is None or row.trained is None:
        return replace(row, trained=None)
    trained = np.array(row.trained)
    trained[: len(before.trained)] |= before.trained
    return replace(row, trained=trained)
