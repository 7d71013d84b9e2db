"""Checks the caller's rows and sorts them: equal prefixes become neighbours, and each row tells what it shares with the
one before it.

This alone determines the trie. Every error names the row and the value. Legend: B rows, S segments, F flat elements.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest.jagged import Jagged

INT32_MAX = np.iinfo(np.int32).max


class RowError(ValueError):
    """A row cannot be used; the message names it."""


def _flatten(rows: Sequence[np.ndarray | Sequence[int]]) -> Jagged:
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


def _read_merge_keys(
    merge_key: Sequence[Hashable | np.ndarray], lengths: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """Check merge keys against the rows.

    Args:
        merge_key: B entries. A hashable (adapter name, prompt id) applies to the whole row; an integer array or list
            as long as the row (image hashes) to each token. Rows of the two kinds never merge.
        lengths: int64 [B], number of tokens of each row.

    Returns:
        int32 [B], only rows with equal codes may merge; and for each row int64 keys of its tokens, or None.

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
    return np.array(codes, dtype=np.int32), token_keys


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowOrder:
    """A depth-first order of rows."""

    rows: np.ndarray
    """int64 [B], row indices in this order."""
    shared: np.ndarray
    """int64 [B], length of the prefix that ``rows[k]`` shares with ``rows[k - 1]``; 0 for the first."""
    lengths: np.ndarray
    """int64 [B], number of tokens of ``rows[k]``."""

    @property
    def num_unique(self) -> int:
        """Number of unique tokens of all rows."""
        return int((self.lengths - self.shared).sum())

    def select(self, rows: Sequence[int] | np.ndarray) -> "RowOrder":
        """The order restricted to the given rows; their own order and repetitions do not matter."""
        return self.take(np.flatnonzero(np.isin(self.rows, np.asarray(rows, dtype=np.int64))))

    def take(self, ranks: np.ndarray) -> "RowOrder":
        """The rows at the given ranks (int64, ascending, distinct).

        Two rows share the smallest ``shared`` of the rows between them.
        """
        shared = np.zeros(len(ranks), dtype=np.int64)
        if len(ranks) > 1:
            span = self.shared[ranks[0] : ranks[-1] + 1]
            shared[1:] = np.minimum.reduceat(span, ranks[:-1] + 1 - ranks[0])
        return RowOrder(rows=self.rows[ranks], shared=shared, lengths=self.lengths[ranks])


def sort_rows(
    rows: Sequence[np.ndarray | Sequence[int]], merge_key: Sequence[Hashable | np.ndarray] | None
) -> tuple[Jagged, RowOrder]:
    """Rows of token ids as int32, and their order in which equal prefixes are neighbours; arguments and errors are
    those of `Forest.from_rows`.

    Rows are compared as byte strings (memcmp). Endianness does not matter: any fixed order of symbols gives the same
    trie. Identical rows keep their order.
    """
    flat = _flatten(rows)
    ids = list(flat)
    code_B, token_keys = _read_merge_keys([None] * len(ids) if merge_key is None else merge_key, flat.lengths)
    strings = [code_B[row].tobytes() + _sortable(ids[row], token_keys[row]) for row in range(len(ids))]
    sorted_rows = sorted(range(len(ids)), key=strings.__getitem__)
    shared = [0] * len(ids)
    for rank in range(1, len(ids)):
        before, row = sorted_rows[rank - 1], sorted_rows[rank]
        if code_B[before] != code_B[row]:
            continue
        shared[rank] = shared_prefix(ids[before], ids[row])
        key_before, key = token_keys[before], token_keys[row]
        if key_before is not None and key is not None:
            shared[rank] = min(shared[rank], shared_prefix(key_before, key))
    order = np.array(sorted_rows, dtype=np.int64)
    return flat, RowOrder(rows=order, shared=np.array(shared, dtype=np.int64), lengths=flat.lengths[order])


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common prefix of two arrays."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _sortable(ids: np.ndarray, key: np.ndarray | None) -> bytes:
    if key is None:
        return ids.tobytes()
    symbols = np.empty(len(ids), dtype=[("key", np.int64), ("id", np.int32)])
    symbols["key"], symbols["id"] = key, ids
    return symbols.tobytes()
