"""Which part of a large forest a drawing shows, and a summary of the rest. Legend: S segments."""

from dataclasses import dataclass

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.report.counted import counted


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shown:
    """The heaviest segments of a forest. If a segment is shown, so are its ancestors."""

    segments: np.ndarray
    """int64, shown segments in layout order."""
    shown_branches: np.ndarray
    """int64 [S], number of shown children of each segment."""
    hidden_branches: np.ndarray
    """int64 [S], number of hidden children of each segment."""
    hidden_tokens: np.ndarray
    """int64 [S], unique tokens in the subtrees of the hidden children."""
    rows_that_end: np.ndarray
    """int64 [S], number of rows that end with the segment's last token."""
    hidden_roots: int
    """Number of trees that are not shown at all."""


def choose_shown(forest: Forest, *, max_segments: int, max_level: int | None = None) -> Shown:
    """Choose the ``max_segments`` heaviest segments with at most ``max_level`` ancestors (None: any number).

    Raises:
        ValueError: ``max_segments`` is below 1.
    """
    if max_segments < 1:
        raise ValueError(f"max_segments: expected at least 1, received {max_segments}")
    segments = forest.segments
    level = np.zeros(len(segments), dtype=np.int64)
    for segment, parent in enumerate(segments.parent.tolist()):
        level[segment] = level[parent] + 1 if parent >= 0 else 0
    tokens = segments.subtree_end.astype(np.int64) - segments.start
    candidates = np.arange(len(segments)) if max_level is None else np.flatnonzero(level <= max_level)
    # An ancestor is at least as heavy and comes earlier, so a stable sort chooses it before its descendants.
    chosen = candidates[np.argsort(-tokens[candidates], kind="stable")][:max_segments]
    is_shown = np.zeros(len(segments), dtype=bool)
    is_shown[chosen] = True
    child = np.flatnonzero(segments.parent >= 0)
    hidden_child = child[~is_shown[child]]

    def sum_by_parent(amount: np.ndarray, children: np.ndarray) -> np.ndarray:
        sums = np.bincount(segments.parent[children], weights=amount[children], minlength=len(segments))
        return sums.astype(np.int64)

    hidden_branches = sum_by_parent(np.ones(len(segments)), hidden_child)
    return Shown(
        segments=np.sort(chosen),
        shown_branches=segments.num_children - hidden_branches,
        hidden_branches=hidden_branches,
        hidden_tokens=sum_by_parent(tokens, hidden_child),
        rows_that_end=segments.path_count - sum_by_parent(segments.path_count, child),
        hidden_roots=int((~is_shown & (segments.parent < 0)).sum()),
    )


def caption(forest: Forest) -> str:
    """One line of statistics of a forest."""
    if not forest.num_rows:
        return "empty forest"
    return (
        f"{counted(forest.num_rows, 'row')}, {counted(forest.num_trees, 'tree')}, "
        f"{forest.num_unique:,} unique of {forest.num_flat:,} flat tokens, "
        f"POR {forest.por:.3f}, token bound {forest.token_bound:.2f}x"
    )
