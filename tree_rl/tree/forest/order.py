"""Sorted rows with equal prefixes next to each other, and how many tokens each row shares with the one before it.

This alone determines the trie. Legend: B rows, S segments, F flat tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest.jagged import Jagged
from tree_rl.tree.forest.rows import MergeKeys


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


def sort_by_tokens(flat: Jagged, keys: MergeKeys | None) -> RowOrder:
    """Sort rows (int32 token ids) so that rows with equal prefixes are neighbours; identical rows keep their order.

    Rows are compared as byte strings (memcmp). Endianness does not matter: any fixed order of symbols gives the same
    trie. Without keys, rows merge by ids alone.
    """
    ids = list(flat)
    strings = [_sortable(ids[row], keys, row) for row in range(len(ids))]
    rows = sorted(range(len(ids)), key=strings.__getitem__)
    shared = [0] * len(rows)
    for rank in range(1, len(rows)):
        before, row = rows[rank - 1], rows[rank]
        if keys is not None and keys.row_code[before] != keys.row_code[row]:
            continue
        shared[rank] = shared_prefix(ids[before], ids[row])
        if keys is not None and (key := keys.token_key[row]) is not None:
            key_before = keys.token_key[before]
            assert key_before is not None
            shared[rank] = min(shared[rank], shared_prefix(key_before, key))
    order = np.array(rows, dtype=np.int64)
    return RowOrder(rows=order, shared=np.array(shared, dtype=np.int64), lengths=flat.lengths[order])


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


def _sortable(ids: np.ndarray, keys: MergeKeys | None, row: int) -> bytes:
    if keys is None:
        return ids.tobytes()
    head, key = keys.row_code[row].tobytes(), keys.token_key[row]
    if key is None:
        return head + ids.tobytes()
    symbols = np.empty(len(ids), dtype=[("key", np.int64), ("id", np.int32)])
    symbols["key"], symbols["id"] = key, ids
    return head + symbols.tobytes()
