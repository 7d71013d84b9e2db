"""Why trajectories branch, judged by token ids and the mask of sampled tokens. Legend: B rows."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged


class BranchCause(StrEnum):
    """Cause of a branch, judged by the first token on each side."""

    PREFIX_END = "prefix end"
    """A row ends where others go on."""
    SAMPLING = "sampling"
    """Both tokens were sampled: the model decided differently."""
    CONTEXT_EDIT = "context edit"
    """One token was sampled, the other was not: the history was rewritten, for example without its reasoning."""
    OBSERVATION = "observation"
    """Neither token was sampled: a different tool result, user turn or prompt."""
    UNKNOWN = "unknown"
    """The rows do not say which tokens were sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A point where a child segment, or the end of a row, leaves the heaviest path."""

    segment: int
    """Segment after whose last token the branch leaves."""
    child: int | None
    """Child segment that leaves; None if a row ends."""
    cause: BranchCause
    """Cause, judged against the heaviest child of ``segment``."""


def classify_branches(forest: Forest, *, sampled: Jagged | None = None) -> tuple[Branch, ...]:
    """All branches, by segment: every child but the heaviest, and every end of a row where other rows go on.

    Args:
        forest: the rows.
        sampled: [B, L_b], nonzero where the row's token was sampled from the model; None if unknown. A token
            counts as sampled if it was sampled in any row.

    Raises:
        ValueError: the mask has another shape than the rows.
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


def _cause(forest: Forest, left: int, right: int, was_sampled: np.ndarray | None) -> BranchCause:
    if was_sampled is None:
        return BranchCause.UNKNOWN
    sides = was_sampled[forest.segments.start[[left, right]]]
    if sides.all():
        return BranchCause.SAMPLING
    return BranchCause.CONTEXT_EDIT if sides.any() else BranchCause.OBSERVATION
