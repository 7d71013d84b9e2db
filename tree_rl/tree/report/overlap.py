"""How much the rows of a forest overlap and what that can save, per tree and in total.

Legend: N unique tokens, S segments, B rows, F flat tokens, T trees.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.tree.cost import ModelShape, trained_unique_tokens
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Overlap of one tree or of a whole forest."""

    paths: int
    """Rows."""
    unique_tokens: int
    """N, tokens that the tree computes."""
    flat_tokens: int
    """F, tokens that the rows contain."""
    unique_pairs: int
    """Visible (query, key) pairs in the tree."""
    flat_pairs: int
    """Visible pairs in the rows."""
    unique_head_tokens: int
    """Unique tokens with a loss in at least one row: what the language-model head computes."""
    flat_head_tokens: int
    """Row tokens with a loss."""
    segments: int
    """Runs of tokens that share one set of rows."""
    branch_points: int
    """Segments with at least two children."""
    depth: int
    """Tokens of the longest row."""

    @property
    def por(self) -> float:
        """Potential overlap ratio 1 - N / F; 0 without tokens."""
        return 1.0 - self.unique_tokens / self.flat_tokens if self.flat_tokens else 0.0

    @property
    def token_bound(self) -> float:
        """1 / (1 - POR): the bound on the speed-up if only tokens counted; 1 without tokens."""
        return self.flat_tokens / self.unique_tokens if self.unique_tokens else 1.0

    def tree_flops(self, shape: ModelShape) -> float:
        """Operations of one step over the tree."""
        return shape.flops(float(self.unique_tokens), float(self.unique_pairs), float(self.unique_head_tokens))

    def flat_flops(self, shape: ModelShape) -> float:
        """Operations of one step over the rows."""
        return shape.flops(float(self.flat_tokens), float(self.flat_pairs), float(self.flat_head_tokens))

    def flop_bound(self, shape: ModelShape) -> float:
        """Flat over tree operations, attention and head included: the honest bound on the speed-up."""
        tree = self.tree_flops(shape)
        return self.flat_flops(shape) / tree if tree else 1.0


def measure_trees(forest: Forest, *, trained: Jagged | None = None) -> tuple[Overlap, ...]:
    """Overlap of each tree.

    Args:
        forest: the rows.
        trained: [B, L_b], nonzero where the row's token has a loss; None means everywhere.

    Returns:
        One entry per tree, in layout order.
    """
    trees, segments = forest.num_trees, forest.segments
    tree_of_segment, tree_of_row = forest.tree_of_segment, forest.tree_of_row
    lengths = forest.row_index.lengths
    size = segments.lengths.astype(np.int64)
    depth = np.zeros(trees, dtype=np.int64)
    np.maximum.at(depth, tree_of_row, lengths)
    columns = {
        "paths": np.bincount(tree_of_row, minlength=trees),
        "unique_tokens": _sums(tree_of_segment, size, trees),
        "flat_tokens": _sums(tree_of_row, lengths, trees),
        "unique_pairs": _sums(tree_of_segment, size * segments.depth + size * (size + 1) // 2, trees),
        "flat_pairs": _sums(tree_of_row, lengths * (lengths + 1) // 2, trees),
        "segments": np.bincount(tree_of_segment, minlength=trees),
        "branch_points": _sums(tree_of_segment, segments.num_children >= 2, trees),
        "depth": depth,
    }
    if trained is None:
        columns |= {"unique_head_tokens": columns["unique_tokens"], "flat_head_tokens": columns["flat_tokens"]}
    else:
        unique = _counts_per_run(trained_unique_tokens(forest, trained), segments.start, segments.end)
        flat = _counts_per_run(trained.values != 0, trained.offsets[:-1], trained.offsets[1:])
        columns["unique_head_tokens"] = _sums(tree_of_segment, unique, trees)
        columns["flat_head_tokens"] = _sums(tree_of_row, flat, trees)
    return tuple(Overlap(**{name: int(column[tree]) for name, column in columns.items()}) for tree in range(trees))


def measure_forest(forest: Forest, *, trained: Jagged | None = None) -> Overlap:
    """Overlap of the whole forest.

    Args:
        forest: the rows.
        trained: [B, L_b], nonzero where the row's token has a loss; None means everywhere.

    Returns:
        Sums over the trees; ``depth`` is the largest. An empty forest gives zeros.
    """
    return combine(measure_trees(forest, trained=trained))


def combine(parts: tuple[Overlap, ...] | list[Overlap]) -> Overlap:
    """Sums over parts, such as trees or ranks; ``depth`` is the largest."""
    names = [name for name in Overlap.__slots__ if name != "depth"]
    totals = {name: sum(getattr(part, name) for part in parts) for name in names}
    return Overlap(**totals, depth=max((part.depth for part in parts), default=0))


def _sums(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """int64 [size], exact sums of values per index: ``bincount`` with weights would round beyond 2**53."""
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, index, values)
    return totals


def _counts_per_run(marks: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """int64 [runs], marks set within each run [start, end)."""
    before = np.concatenate(([0], np.cumsum(marks)))
    return before[end] - before[start]
