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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _MergeKeys:
    """Keys that keep equal ids separate: tokens merge only if ids and keys agree along the whole prefix."""

    row_code: np.ndarray
    """int32 [B]; only rows with equal codes may merge."""
    token_key: tuple[np.ndarray | None, ...]
    """B entries: int64 [length of the row], or None for a row without per-token keys."""


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


def _read_merge_keys(merge_key: Sequence[Hashable | np.ndarray], lengths: np.ndarray) -> _MergeKeys:
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
    return _MergeKeys(row_code=np.array(codes, dtype=np.int32), token_key=tuple(token_keys))


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
    keys = None if merge_key is None else _read_merge_keys(merge_key, flat.lengths)
    ids = list(flat)
    strings = [_sortable(ids[row], keys, row) for row in range(len(ids))]
    sorted_rows = sorted(range(len(ids)), key=strings.__getitem__)
    shared = [0] * len(ids)
    for rank in range(1, len(ids)):
        before, row = sorted_rows[rank - 1], sorted_rows[rank]
        if keys is not None and keys.row_code[before] != keys.row_code[row]:
            continue
        shared[rank] = shared_prefix(ids[before], ids[row])
        if keys is not None and (key := keys.token_key[row]) is not None:
            key_before = keys.token_key[before]
            assert key_before is not None
            shared[rank] = min(shared[rank], shared_prefix(key_before, key))
    order = np.array(sorted_rows, dtype=np.int64)
    return flat, RowOrder(rows=order, shared=np.array(shared, dtype=np.int64), lengths=flat.lengths[order])


def order_by_layout(
    *, last_token_B: np.ndarray, lengths_B: np.ndarray, start_S: np.ndarray, depth_S: np.ndarray
) -> RowOrder:
    """Rows by where they end in a depth-first layout: a row comes before its extensions, identical rows keep order.

    Args:
        last_token_B: layout index of each row's last token.
        lengths_B: tokens of each row.
        start_S: layout index of each segment's first token.
        depth_S: position of each segment's first token.
    """
    rows = np.argsort(last_token_B, kind="stable")
    lengths = lengths_B[rows].astype(np.int64)
    # A row leaves its predecessor at the shallowest segment that no earlier row has entered.
    shared = lengths.copy()
    np.minimum.at(shared, np.searchsorted(last_token_B[rows], start_S), depth_S)
    return RowOrder(rows=rows, shared=shared, lengths=lengths)


def shared_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common prefix of two arrays."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _sortable(ids: np.ndarray, keys: _MergeKeys | None, row: int) -> bytes:
    if keys is None:
        return ids.tobytes()
    head, key = keys.row_code[row].tobytes(), keys.token_key[row]
    if key is None:
        return head + ids.tobytes()
    symbols = np.empty(len(ids), dtype=[("key", np.int64), ("id", np.int32)])
    symbols["key"], symbols["id"] = key, ids
    return head + symbols.tobytes()
