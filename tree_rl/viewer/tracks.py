"""Values that the page draws along a tree's tokens: one per run of tokens; runs end at segment ends.

Legend: N unique tokens, F row tokens, T runs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tree_rl.tree import Forest

MOST_RUNS = 20_000
"""Most runs of a numeric track besides one per segment; a finer track is averaged over neighbouring tokens."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Track:
    """Values along the unique tokens; each run ends where the next one starts."""

    start: np.ndarray
    """int64 [T], first unique token of each run; every segment starts a run."""
    value: np.ndarray
    """[T]; NaN or a negative integer means no value."""

    def as_json(self) -> dict[str, list[Any]]:
        """Lists of numbers, null for no value."""
        whole = np.issubdtype(self.value.dtype, np.integer)
        missing = self.value < 0 if whole else ~np.isfinite(self.value)
        values = self.value.tolist() if whole else [float(f"{value:.4g}") for value in self.value.tolist()]
        shown = [None if gone else value for value, gone in zip(values, missing.tolist(), strict=True)]
        return {"start": self.start.tolist(), "value": shown}


def class_track(forest: Forest, value_N: np.ndarray) -> Track:
    """Runs of equal integers."""
    start = _run_starts(forest, value_N[1:] != value_N[:-1])
    return Track(start=start, value=value_N[start])


def number_track(forest: Forest, value_N: np.ndarray) -> Track:
    """Runs of equal numbers; if they exceed `MOST_RUNS`, means over longer runs of tokens that all have a number."""
    has = np.isfinite(value_N)
    same = (value_N[1:] == value_N[:-1]) | (~has[1:] & ~has[:-1])
    start = _run_starts(forest, ~same)
    if len(start) <= MOST_RUNS + forest.num_segments:
        return Track(start=start, value=np.where(has[start], value_N[start], np.nan))
    tokens = -(-forest.num_unique // MOST_RUNS)
    grid = np.arange(1, forest.num_unique) % tokens == 0
    start = _run_starts(forest, (has[1:] != has[:-1]) | (grid & has[1:]))
    length = np.diff(np.append(start, forest.num_unique))
    sums = np.add.reduceat(np.where(has, value_N, 0.0), start)
    return Track(start=start, value=np.where(has[start], sums / length, np.nan))


def mean_over_rows(forest: Forest, value_F: np.ndarray) -> np.ndarray:
    """float64 [N], mean of the values [F] of all rows through each unique token; NaN if none has a value."""
    has = np.isfinite(value_F)
    index = forest.row_index.values[has]
    count = np.bincount(index, minlength=forest.num_unique)
    total = np.bincount(index, weights=value_F[has], minlength=forest.num_unique)
    return np.divide(total, count, out=np.full(forest.num_unique, np.nan), where=count > 0)


def _run_starts(forest: Forest, changes: np.ndarray) -> np.ndarray:
    is_start = np.zeros(forest.num_unique, dtype=bool)
    is_start[1:] = changes
    is_start[forest.segments.start] = True
    return np.flatnonzero(is_start)
