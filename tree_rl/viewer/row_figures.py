"""What a file says of each row besides its tokens: reward, advantage, change of log-probs, version of the weights."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tree_rl.inspection.files.columns import ColumnFile, read_columns
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import data_files

FIGURES: Mapping[str, str] = {
    "reward": "reward",
    "advantage": "advantage (mean over the row)",
    "log_prob_change": "old log-prob less the rollout's (mean over the row)",
    "version": "version of the weights",
}
"""Names in the page's data -> words for a reader."""
COLUMNS: Mapping[str, Sequence[str]] = {
    "reward": ("reward", "score", "rewards"),
    "advantage": ("advantage", "advantages"),
    "version": ("min_version", "weight_version", "version", "step"),
}
"""Figure -> columns that may hold it, the first that is there counts; lists are averaged over the row."""
OLD, ROLLOUT = ("old_log_probs", "old_logprobs"), ("rollout_log_probs", "rollout_logprobs")
PLACE = re.compile(r"row (\d+)")
"""Of a row in its file, in the row's name."""

Figures = dict[str, float]


def read_figures(path: Path, rows: Sequence[Row]) -> list[Figures]:
    """Figures of each row.

    Args:
        path: the file, folder or pattern that `rows` come from, in its order.

    Raises:
        InputError: a file that cannot be read.
    """
    wanted = {*OLD, *ROLLOUT, *(column for columns in COLUMNS.values() for column in columns)}
    files = [_of_file(read_columns(file, wanted)) for file in data_files(path)]
    found: list[Figures] = []
    file, last = 0, -1
    for row in rows:
        match = PLACE.search(row.name)
        place = int(match[1]) if match else last + 1
        # Names begin again with each file.
        file, last = file + (place < last), place
        known = files[file] if file < len(files) else []
        found.append(known[place] if place < len(known) else {})
    return found


def _of_file(file: ColumnFile) -> list[Figures]:
    figures: list[Figures] = [{} for _ in range(file.num_rows)]
    for figure, columns in COLUMNS.items():
        column = next((name for name in columns if name in file.columns), None)
        for one, value in zip(figures, [] if column is None else file.values(column), strict=False):
            _put(one, figure, value)
    old, rollout = (next((name for name in names if name in file.columns), None) for names in (OLD, ROLLOUT))
    if old is not None and rollout is not None:
        for one, pair in zip(figures, zip(file.values(old), file.values(rollout), strict=True), strict=True):
            after, before = (_mean(value) for value in pair)
            if after is not None and before is not None:
                one["log_prob_change"] = after - before
    return figures


def _put(figures: Figures, name: str, value: Any) -> None:
    mean = _mean(value)
    if mean is not None:
        figures[name] = mean


def _mean(value: Any) -> float | None:
    """A number, or the mean of a list of numbers; None for anything else, and for no number."""
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    mean = float(numbers.mean()) if numbers.size else math.nan
    return mean if math.isfinite(mean) else None
