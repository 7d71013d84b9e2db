"""The compressed trie of sorted rows and its depth-first layout, heaviest subtree first, without recursion.

Legend: B rows, S segments.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest.order import RowOrder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Trie:
    """Segments in no particular order; all arrays are int64 [S]."""

    parent: np.ndarray
    """Parent segment, -1 at a root."""
    end_depth: np.ndarray
    """Depth just past the segment's last token."""
    tokens: np.ndarray
    """Unique tokens of the whole subtree."""
    path_count: np.ndarray
    """Number of rows through the segment."""
    first_row: np.ndarray
    """Smallest index of a row through the segment; orders equally heavy siblings."""
    first_rank: np.ndarray
    """Rank, in the `RowOrder`, of the first row through the segment."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segments:
    """S trie nodes in depth-first preorder; the heaviest subtree (most unique tokens) comes first among siblings."""

    start: np.ndarray
    """int32 [S], index of the first token."""
    end: np.ndarray
    """int32 [S], index past the last token; no segment is empty."""
    parent: np.ndarray
    """int32 [S], parent segment, -1 at a root."""
    subtree_end: np.ndarray
    """int32 [S], index past the last token of the subtree."""
    path_count: np.ndarray
    """int32 [S], g: number of rows through the segment."""
    depth: np.ndarray
    """int32 [S], depth of the first token."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [S], number of tokens of each segment."""
        return self.end - self.start

    @property
    def num_children(self) -> np.ndarray:
        """int64 [S], number of child segments of each segment."""
        return np.bincount(self.parent[self.parent >= 0], minlength=len(self))


def _build_trie(order: RowOrder) -> _Trie:
    """Build the trie, at most 2 B segments, in one pass over sorted rows.

    The stack holds the open segments, which form the right edge of the trie. A row that is a prefix of another row
    ends a segment.
    """
    columns: tuple[list[int], ...] = ([], [], [], [], [], [])
    parent, end, tokens, count, first_row, first_rank = columns
    stack: list[int] = []

    def open_segment(end_depth: int, rank: int, row: int) -> None:
        stack.append(len(end))
        for column, value in zip(columns, (-1, end_depth, 0, 0, row, rank), strict=True):
            column.append(value)

    # The last entry is a sentinel, an empty row: it closes all open segments.
    ranks = zip([*order.rows.tolist(), -1], [*order.shared.tolist(), 0], [*order.lengths.tolist(), 0], strict=True)
    for rank, (row, shared, length) in enumerate(ranks):
        while stack and end[stack[-1]] > shared:
            segment = stack.pop()
            if (end[stack[-1]] if stack else 0) < shared:
                open_segment(shared, first_rank[segment], first_row[segment])
            above = stack[-1] if stack else -1
            parent[segment] = above
            tokens[segment] += end[segment] - (end[above] if stack else 0)
            if stack:
                tokens[above] += tokens[segment]
                count[above] += count[segment]
                first_row[above] = min(first_row[above], first_row[segment])
        if length > shared:
            open_segment(length, rank, row)
        if length:
            count[stack[-1]] += 1
            first_row[stack[-1]] = min(first_row[stack[-1]], row)
    arrays = [np.array(column, dtype=np.int64) for column in columns]
    return _Trie(**dict(zip(_Trie.__slots__, arrays, strict=True)))


def lay_out(rows: RowOrder) -> tuple[Segments, np.ndarray]:
    """The rows' segments depth first, heaviest subtree first, equal weights by first row; and their `first_rank`.

    Raises:
        ValueError: more unique tokens than int32 can index.
    """
    trie = _build_trie(rows)
    parent, has_parent = trie.parent, trie.parent >= 0
    depth = np.where(has_parent, trie.end_depth[parent], 0)
    length = trie.end_depth - depth
    num_unique = int(trie.tokens[~has_parent].sum())
    if num_unique > np.iinfo(np.int32).max:
        raise ValueError(f"expected at most {np.iinfo(np.int32).max} unique tokens, received {num_unique}: split rows")
    step = _tokens_of_siblings_before(trie) + np.where(has_parent, length[parent], 0)
    start = _sum_to_root(step, parent)
    order = np.argsort(start)
    number = np.empty(len(order) + 1, dtype=np.int64)
    number[order] = np.arange(len(order))
    number[-1] = -1
    columns = {
        "start": start,
        "end": start + length,
        "parent": number[parent],
        "subtree_end": start + trie.tokens,
        "path_count": trie.path_count,
        "depth": depth,
    }
    segments = Segments(**{name: column[order].astype(np.int32) for name, column in columns.items()})
    return segments, trie.first_rank[order]


def _tokens_of_siblings_before(trie: _Trie) -> np.ndarray:
    """int64 [S], unique tokens of the subtrees of all siblings that come before the segment."""
    order = np.lexsort((trie.first_row, -trie.tokens, trie.parent))
    before = np.cumsum(trie.tokens[order]) - trie.tokens[order]
    parent = trie.parent[order]
    leads = np.ones(len(order), dtype=bool)
    leads[1:] = parent[1:] != parent[:-1]
    before -= np.maximum.accumulate(np.where(leads, before, 0))
    result = np.empty_like(before)
    result[order] = before
    return result


def _sum_to_root(values: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """For each segment, the sum of values over itself and its ancestors, by pointer doubling in log2(depth) steps."""
    total, ancestor = values.copy(), parent.copy()
    while (alive := np.flatnonzero(ancestor >= 0)).size:
        total[alive] += total[ancestor[alive]]
        ancestor[alive] = ancestor[ancestor[alive]]
    return total
