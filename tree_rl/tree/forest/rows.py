"""Checks the caller's rows and concatenates them; every error names the row and the value. Legend: B rows."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest.jagged import Jagged

INT32_MAX = np.iinfo(np.int32).max


class RowError(ValueError):
    """A row cannot be used; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergeKeys:
    """Keys that keep equal ids separate: tokens merge only if ids and keys agree along the whole prefix."""

    row_code: np.ndarray
    """int32 [B]; only rows with equal codes may merge."""
    token_key: tuple[np.ndarray | None, ...]
    """B entries: int64 [length of the row], or None for a row without per-token keys."""


def flatten_rows(rows: Sequence[np.ndarray | Sequence[int]]) -> Jagged:
    """Check rows of token ids and concatenate them as int32; no rows give B = 0.

    Raises:
        RowError: a row is empty, not one-dimensional or not integer, or has an id that is negative or beyond int32.
    """
    arrays = [_integer_array(row, index, "token ids") for index, row in enumerate(rows)]
    for index, array in enumerate(arrays):
        if array.size == 0:
            raise RowError(f"row {index}: expected at least one token, received an empty row; drop it before planning")
    flat = Jagged.from_rows(arrays) if arrays else Jagged.from_rows([], dtype=np.int32)
    if flat.values.size and (flat.values.min() < 0 or flat.values.max() > INT32_MAX):
        at = int(np.argmax((flat.values < 0) | (flat.values > INT32_MAX)))
        row = int(np.searchsorted(flat.offsets, at, side="right")) - 1
        where = f"token {at - flat.offsets[row]} is {flat.values[at]}"
        raise RowError(f"row {row}: expected ids in [0, {INT32_MAX}], but {where}; strip padding and mask ids first")
    return flat.with_values(flat.values.astype(np.int32, copy=False))


def read_merge_keys(merge_key: Sequence[Hashable | np.ndarray], lengths: np.ndarray) -> MergeKeys:
    """Check merge keys against the rows.

    Args:
        merge_key: B entries. A hashable (adapter name, prompt id) applies to the whole row; an integer array or list
            as long as the row (image hashes) to each token. Rows of the two kinds never merge.
        lengths: int64 [B], number of tokens of each row.

    Raises:
        ValueError: not one entry per row.
        RowError: an array has another length than its row, or is not integer.
    """
    if len(merge_key) != len(lengths):
        raise ValueError(f"merge_key: expected one entry for each of {len(lengths)} rows, received {len(merge_key)}")
    code_of: dict[tuple[str, Hashable], int] = {}
    codes: list[int] = []
    token_keys: list[np.ndarray | None] = []
    for row, key in enumerate(merge_key):
        if isinstance(key, np.ndarray | list):
            array = _integer_array(key, row, "merge_key").astype(np.int64, copy=False)
            if len(array) != lengths[row]:
                raise RowError(f"row {row}: expected a merge_key of {lengths[row]} tokens, received {len(array)}")
            label: tuple[str, Hashable] = ("per token", None)
            token_keys.append(array)
        else:
            label = ("per row", key)
            token_keys.append(None)
        codes.append(code_of.setdefault(label, len(code_of)))
    return MergeKeys(row_code=np.array(codes, dtype=np.int32), token_key=tuple(token_keys))


def _integer_array(row: np.ndarray | Sequence[int], index: int, what: str) -> np.ndarray:
    array = np.asarray(row)
    if array.ndim != 1:
        raise RowError(f"row {index}: expected {what} of one dimension, received shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise RowError(f"row {index}: expected integer {what}, received {array.dtype} (first value {array[0]!r})")
    if array.dtype == np.uint64:
        # A mix of int64 and uint64 would be promoted to float64, which merges neighbouring ids.
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise RowError(f"row {index}: expected {what} within int64, received {array.max()}")
        array = array.astype(np.int64)
    return array
