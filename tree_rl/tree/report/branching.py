"""Why trajectories branch, judged by token ids and the mask of sampled tokens.

Legend: B rows, S segments.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged


class BranchCause(StrEnum):
    """Why a branch exists, judged by the first tokens on both sides."""

    PREFIX_END = "prefix end"
    """A row ends where others go on."""
    SAMPLING = "sampling"
    """Both sides were sampled: the model decided differently."""
    CONTEXT_EDIT = "context edit"
    """One side was sampled, the other was given: history was rewritten, for example without its reasoning."""
    OBSERVATION = "observation"
    """Both sides were given: another tool result, user turn or prompt."""
    UNKNOWN = "unknown"
    """The rows do not say which tokens were sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One child, or one row's end, that leaves the heaviest path."""

    segment: int
    """The segment after whose last token it leaves."""
    child: int | None
    """The segment that leaves; None for a row's end."""
    cause: BranchCause
    """Judged against the heaviest child of ``segment``."""


def classify_branches(forest: Forest, *, sampled: Jagged | None = None) -> tuple[Branch, ...]:
    """Name the cause of every branch: every child but the heaviest, and every row's end before others.

    Args:
        forest: the rows.
        sampled: [B, L_b], nonzero where the row's token was sampled from the model; None when unknown. A token
            counts as sampled when it was in any row.

    Returns:
        Branches in layout order of the segment that they leave.

    Raises:
        ValueError: a mask whose shape is not that of the rows.
    """
    segments = forest.segments
    was_sampled = None if sampled is None else forest.rows_that_mark(sampled) > 0
    first_child = np.full(len(segments), -1, dtype=np.int64)
    rows_that_end = segments.path_count.astype(np.int64)
    branches = []
    for child, parent in enumerate(segments.parent.tolist()):
        if parent < 0:
            continue
        rows_that_end[parent] -= segments.path_count[child]
        if first_child[parent] < 0:
            first_child[parent] = child
            continue
        cause = _cause(forest, int(first_child[parent]), child, was_sampled)
        branches.append(Branch(segment=parent, child=child, cause=cause))
    for segment in np.flatnonzero((rows_that_end > 0) & (first_child >= 0)).tolist():
        branches.append(Branch(segment=segment, child=None, cause=BranchCause.PREFIX_END))
    return tuple(sorted(branches, key=lambda branch: (branch.segment, -1 if branch.child is None else branch.child)))


def count_causes(branches: Sequence[Branch]) -> dict[BranchCause, int]:
    """Number of branches of each cause that occurs, most frequent first."""
    return dict(Counter(branch.cause for branch in branches).most_common())


def _cause(forest: Forest, left: int, right: int, was_sampled: np.ndarray | None) -> BranchCause:
    if was_sampled is None:
        return BranchCause.UNKNOWN
    sides = was_sampled[forest.segments.start[[left, right]]]
    if sides.all():
        return BranchCause.SAMPLING
    return BranchCause.CONTEXT_EDIT if sides.any() else BranchCause.OBSERVATION
