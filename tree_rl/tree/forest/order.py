"""Rows in an order that puts common prefixes side by side, and how many tokens each row shares with the one before.

The order determines the trie without another look at the tokens. Legend: B rows, S segments, F flat tokens.
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
    """int64 [B], row indices."""
    shared: np.ndarray
    """int64 [B], leading tokens that the row shares with the row before it; 0 for the first."""
    lengths: np.ndarray
    """int64 [B], tokens of ``rows[k]``."""

    @property
    def num_unique(self) -> int:
        """Unique tokens of the rows together."""
        return int((self.lengths - self.shared).sum())

    def select(self, rows: Sequence[int] | np.ndarray) -> "RowOrder":
        """A subset of the rows in this order, whatever their own order and repetitions."""
        return self.take(np.flatnonzero(np.isin(self.rows, np.asarray(rows, dtype=np.int64))))

    def take(self, ranks: np.ndarray) -> "RowOrder":
        """The rows at the given ranks (int64, ascending, distinct); ``shared`` becomes the smallest one in between."""
        shared = np.zeros(len(ranks), dtype=np.int64)
        if len(ranks) > 1:
            span = self.shared[ranks[0] : ranks[-1] + 1]
            shared[1:] = np.minimum.reduceat(span, ranks[:-1] + 1 - ranks[0])
        return RowOrder(rows=self.rows[ranks], shared=shared, lengths=self.lengths[ranks])


def sort_by_tokens(flat: Jagged, keys: MergeKeys | None) -> RowOrder:
    """Sort rows so that equal prefixes are neighbours.

    Rows are compared as byte strings (memcmp). The bytes need no particular endianness: any fixed order of symbols
    gives the same trie.

    Args:
        flat: int32 token ids; identical rows stay in the caller's order.
        keys: keeps equal ids apart; None merges by ids alone.
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
    """The order in which rows end in a depth-first layout; a row comes before its extensions.

    Identical rows stay in the caller's order.

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
    """Number of leading elements in which two arrays agree."""
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
