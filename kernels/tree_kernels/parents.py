"""Segments of a forest and the parent of every token, on the host; recurrences and convolutions are planned from them.

A segment is a maximal run of tokens without a branch. There are far fewer segments than tokens, so plans are made for
segments first and expanded to tokens last. Legend: N unique tokens, S segments.
"""

from dataclasses import dataclass

import numpy as np

from tree_kernels.tree_layout import TreeLayout, kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayoutSegments:
    """Segments of a layout in DFS order."""

    start: np.ndarray
    """int64 [S + 1], first token of each segment, then N."""
    past: np.ndarray
    """int64 [S], first segment past the subtree of each segment."""
    above: np.ndarray
    """int64 [S], parent segment, -1 at roots."""

    @property
    def parent(self) -> np.ndarray:
        """int64 [S], parent token of each segment's first token, -1 at roots."""
        return np.where(self.above >= 0, self.start[self.above + 1] - 1, -1)


@kept
def parents_of(layout: TreeLayout) -> np.ndarray:
    """int32 [N], parent of each token, -1 at roots; cached with the layout."""
    segments = segments_of(layout)
    parent = np.arange(-1, layout.num_tokens - 1, dtype=np.int32)
    parent[segments.start[:-1]] = segments.parent
    return parent


@kept
def segments_of(layout: TreeLayout) -> LayoutSegments:
    """The segments of a layout; cached with it."""
    end = layout.subtree_end_on_host()
    is_start = np.ones(len(end), dtype=bool)
    # A token is the only child of the one before it iff their subtrees end together.
    np.not_equal(end[1:], end[:-1], out=is_start[1:])
    start = np.append(np.flatnonzero(is_start), len(end))
    past = np.searchsorted(start, end[start[:-1]])
    return LayoutSegments(start=start, past=past, above=_above(past))


def _above(past: np.ndarray) -> np.ndarray:
    """Parent of each of S nodes in DFS order, -1 at roots.

    A node that follows a node with children is its child. The parent of a node that follows a leaf is the nearest
    earlier node that is one level higher.
    """
    nodes = len(past)
    index = np.arange(nodes)
    above = index - 1
    jumps = 1 + np.flatnonzero(past[:-1] == index[1:])
    if not len(jumps):
        return above
    level = index - np.cumsum(np.bincount(past, minlength=nodes + 1))[:nodes]
    by_level = np.argsort(level, kind="stable")
    level_then_node = level[by_level] * nodes + by_level
    nearest = np.searchsorted(level_then_node, (level[jumps] - 1) * nodes + jumps) - 1
    above[jumps] = np.where(level[jumps] > 0, by_level[nearest], -1)
    return above
