"""The parent of every token, on the host: what recurrences and convolutions follow where attention needs a mask only.

Legend: N unique tokens.
"""

import numpy as np

from tree_kernels.layout import TreeLayout


def parents_of(layout: TreeLayout) -> np.ndarray:
    """int32 [N], the token before each token on its path, -1 at a root of the forest; built once per layout."""
    return layout.metadata("parents", lambda own: parents_from_ends(own.subtree_end_on_host()))


def parents_from_ends(end: np.ndarray) -> np.ndarray:
    """Parents from subtree ends.

    A token behind one with children is its child. A token behind a leaf hangs from the nearest token before it that is
    one level higher.

    Args:
        end: int32 [N], first DFS index past the subtree of each token.

    Returns:
        int32 [N], -1 at roots.
    """
    num_tokens = len(end)
    index = np.arange(num_tokens, dtype=np.int64)
    parent = index - 1
    jumps = 1 + np.flatnonzero(end[:-1] == index[1:])
    if not len(jumps):
        return parent.astype(np.int32)
    position = index - np.cumsum(np.bincount(end, minlength=num_tokens + 1))[:num_tokens]
    by_level = np.argsort(position, kind="stable")
    level_then_token = position[by_level] * num_tokens + by_level
    nearest = np.searchsorted(level_then_token, (position[jumps] - 1) * num_tokens + jumps) - 1
    parent[jumps] = np.where(position[jumps] > 0, by_level[nearest], -1)
    return parent.astype(np.int32)
