"""Rows of unequal length in one array: concatenated values, and the offset at which each row starts.

Legend: B rows, F flat elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Jagged:
    """B rows of unequal length."""

    values: np.ndarray
    """[F], the rows concatenated."""
    offsets: np.ndarray
    """int64 [B + 1]; row b is ``values[offsets[b]:offsets[b + 1]]``."""

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or len(self.offsets) == 0 or self.offsets[-1] != len(self.values):
            last = self.offsets[-1] if self.offsets.size else None
            raise ValueError(f"expected offsets [B + 1] that end at {len(self.values)} values, received end {last}")

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], *, dtype: DTypeLike | None = None) -> "Jagged":
        """Concatenate B one-dimensional arrays; without a dtype NumPy's promotion chooses it."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values=values, offsets=offsets_of([len(array) for array in arrays]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """A view of one row."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"expected a row in [0, {len(self)}), received {row}")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.values[start:stop] for start, stop in pairwise(self.offsets.tolist()))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B], lengths of the rows."""
        return np.diff(self.offsets)

    def with_values(self, values: np.ndarray) -> "Jagged":
        """Jagged array of the same row lengths with other values ([F], any dtype)."""
        return Jagged(values=values, offsets=self.offsets)

    def select(self, rows: Sequence[int] | np.ndarray) -> "Jagged":
        """A copy of the given rows in the given order."""
        picked = [self[int(row)] for row in rows]
        values = np.concatenate(picked) if picked else self.values[:0]
        return Jagged(values=values, offsets=offsets_of([len(row) for row in picked]))


def positions_of_rows(offsets: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """int64, indices of the given rows' elements in `Jagged.values`, row after row."""
    pieces = [np.arange(*offsets[row : row + 2]) for row in rows]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [B + 1], offsets for rows of the given lengths [B]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
