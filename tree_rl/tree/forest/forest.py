"""The prefix forest of a set of rows: every shared token once, in depth-first order.

Token i sees token j iff ``j <= i < subtree_end[j]``; siblings share positions (paper, section Implementation).
Legend: N unique tokens, S segments, B rows, F flat tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest.jagged import Jagged
from tree_rl.tree.forest.order import RowOrder, sort_rows
from tree_rl.tree.forest.trie import Segments, lay_out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forest:
    """One tree per distinct first token. Trees, and siblings within a tree, come heaviest first."""

    input_ids: np.ndarray
    """int32 [N], token ids in depth-first order."""
    parent: np.ndarray
    """int32 [N], index of the preceding token on the path, -1 at a root."""
    position: np.ndarray
    """int32 [N], depth on the path: the RoPE position."""
    subtree_end: np.ndarray
    """int32 [N], first index past the token's subtree; equal within a segment."""
    path_count: np.ndarray
    """int32 [N], g_t: number of rows through the token."""
    segments: Segments
    """S runs of tokens; all tokens of a segment are shared by the same rows."""
    row_index: Jagged
    """int32 [B, L_b], index of the unique token for each flat token; rows in the caller's order."""

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[np.ndarray | Sequence[int]],
        *,
        merge_key: Sequence[Hashable | np.ndarray] | None = None,
    ) -> "Forest":
        """Find the shared prefixes of rows: sort, compare neighbours, lay out.

        Args:
            rows: B sequences of token ids, each at least one token; no rows give an empty forest.
            merge_key: one entry per row that keeps equal ids separate: a hashable for the whole row (adapter name,
                prompt id), or an integer array as long as the row (image hashes). Tokens merge only if ids and keys
                are equal along the whole prefix. None merges by ids alone.

        Returns:
            The forest, deterministic: among equally heavy subtrees the one with the smallest row index comes first.

        Raises:
            RowError: empty row, negative or non-integer id, id beyond int32, merge key of the wrong length.
            ValueError: merge_key does not have one entry per row.
        """
        return _assemble(*sort_rows(rows, merge_key))

    def select_rows(self, rows: Sequence[int] | np.ndarray) -> "Forest":
        """The forest of these rows alone; merge keys still apply.

        The rows are renumbered 0, 1, ... in the given order.

        Raises:
            ValueError: a row is given twice.
            IndexError: a row that does not exist.
        """
        picked = np.asarray(rows, dtype=np.int64)
        if len(np.unique(picked)) != len(picked):
            raise ValueError(f"expected distinct rows, received {picked.tolist()}")
        if picked.size and not 0 <= picked.min() <= picked.max() < self.num_rows:
            raise IndexError(f"expected rows in [0, {self.num_rows}), received {picked.tolist()}")
        if np.array_equal(picked, np.arange(self.num_rows)):
            return self
        index = self.row_index.select(picked)
        order = self.row_order.select(picked)
        new_row = np.full(self.num_rows, -1, dtype=np.int64)
        new_row[picked] = np.arange(len(picked))
        renamed = RowOrder(rows=new_row[order.rows], shared=order.shared, lengths=order.lengths)
        return _assemble(index.with_values(self.input_ids[index.values]), renamed)

    @property
    def num_unique(self) -> int:
        """N, unique tokens."""
        return len(self.input_ids)

    @property
    def num_flat(self) -> int:
        """F, tokens of all rows."""
        return len(self.row_index.values)

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs: each token sees itself and its ancestors."""
        return int(self.position.sum(dtype=np.int64)) + self.num_unique

    @property
    def num_rows(self) -> int:
        """B, rows."""
        return len(self.row_index)

    @property
    def num_segments(self) -> int:
        """S, segments."""
        return len(self.segments)

    @property
    def num_trees(self) -> int:
        """Number of trees (roots)."""
        return int((self.segments.parent < 0).sum())

    @property
    def por(self) -> float:
        """Potential overlap ratio 1 - N / F; 0 for an empty forest."""
        return 1.0 - self.num_unique / self.num_flat if self.num_flat else 0.0

    @property
    def token_bound(self) -> float:
        """Largest speed-up counted in tokens, 1 / (1 - POR) = F / N; 1 for an empty forest."""
        return self.num_flat / self.num_unique if self.num_unique else 1.0

    @property
    def segment_of_token(self) -> np.ndarray:
        """int64 [N], segment index of each unique token."""
        return np.repeat(np.arange(self.num_segments), self.segments.lengths)

    @property
    def tree_of_row(self) -> np.ndarray:
        """int64 [B], tree index of each row."""
        roots = self.segments.start[self.segments.parent < 0]
        first_tokens = self.row_index.values[self.row_index.offsets[:-1]]
        return np.searchsorted(roots, first_tokens, side="right") - 1

    @property
    def rows_per_tree(self) -> np.ndarray:
        """int32 [trees], K: number of rows of each tree."""
        return self.segments.path_count[self.segments.parent < 0]

    @property
    def row_order(self) -> RowOrder:
        """Rows by where they end in the layout: a row comes before its extensions, identical rows keep their order."""
        last_token_B = self.row_index.values[self.row_index.offsets[1:] - 1]
        rows = np.argsort(last_token_B, kind="stable")
        lengths = self.row_index.lengths[rows]
        # A row leaves its predecessor at the shallowest segment that no earlier row has entered.
        shared = lengths.copy()
        np.minimum.at(shared, np.searchsorted(last_token_B[rows], self.segments.start), self.segments.depth)
        return RowOrder(rows=rows, shared=shared, lengths=lengths)

    def row_tokens(self, row: int) -> np.ndarray:
        """int32 [L_b], token ids of one row."""
        return self.input_ids[self.row_index[row]]

    def rows_that_mark(self, marks: Jagged) -> np.ndarray:
        """int64 [N], how many rows mark each unique token; ``marks`` [B, L_b] is nonzero where a row marks its token.

        Raises:
            ValueError: ``marks`` does not have the shape of the rows.
        """
        if not np.array_equal(marks.offsets, self.row_index.offsets):
            raise ValueError("marks: expected one entry per row token, received rows of other lengths")
        return np.bincount(self.row_index.values[marks.values != 0], minlength=self.num_unique)

    def rows_through(self, token: int) -> np.ndarray:
        """int64 [g], rows that contain the edge ``parent[token] -> token``, ascending."""
        last_token = self.row_index.values[self.row_index.offsets[1:] - 1]
        return np.flatnonzero((last_token >= token) & (last_token < self.subtree_end[token]))


def _assemble(flat: Jagged, order: RowOrder) -> Forest:
    """Fill the arrays of a forest.

    A segment's tokens come from the first row through it. A row copies the indices of its shared prefix from the row
    before it. No array here is longer than N or F.
    """
    segments, first_rank = lay_out(order)
    length = segments.lengths
    num_unique = int(length.sum())
    row_start = flat.offsets[order.rows]
    source = np.arange(num_unique, dtype=np.int64)
    source += np.repeat(row_start[first_rank] + segments.depth - segments.start, length)
    index = np.empty(len(flat.values), dtype=np.int32)
    index[source] = np.arange(num_unique, dtype=np.int32)
    starts, shared = row_start.tolist(), order.shared.tolist()
    for rank in range(1, len(starts)):
        if shared[rank]:
            here, before, size = starts[rank], starts[rank - 1], shared[rank]
            index[here : here + size] = index[before : before + size]

    tokens = np.arange(num_unique, dtype=np.int32)
    parent = tokens - 1
    is_child = segments.parent >= 0
    parent[segments.start] = np.where(is_child, segments.end[segments.parent] - 1, -1)
    return Forest(
        input_ids=flat.values[source],
        parent=parent,
        position=tokens + np.repeat(segments.depth - segments.start, length),
        subtree_end=np.repeat(segments.subtree_end, length),
        path_count=np.repeat(segments.path_count, length),
        segments=segments,
        row_index=flat.with_values(index),
    )
