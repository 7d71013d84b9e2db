"""Why trajectories branch, as far as token ids, the sampled mask and a decoder can tell.

Legend: B rows, S segments.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged

RETOKENISATION_WINDOW = 8
"""Tokens after a branch within which two spellings of one text must meet again."""


class BranchCause(StrEnum):
    """What the tokens on both sides of a branch say about its cause."""

    PREFIX_END = "prefix end"
    """A row ends where others go on."""
    SAMPLING = "sampling"
    """Both sides were sampled: the model took another decision."""
    CONTEXT_EDIT = "context edit"
    """One side was sampled, the other was given: history was rewritten, such as by stripping reasoning."""
    OBSERVATION = "observation"
    """Both sides were given: another tool result, user turn or prompt."""
    RETOKENISATION = "retokenisation"
    """Both sides spell the same text with other ids."""
    UNKNOWN = "unknown"
    """Nobody said which tokens were sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One way that leaves a path."""

    segment: int
    """The segment after whose last token it leaves."""
    child: int | None
    """The segment that leaves; None for a row's end."""
    cause: BranchCause
    """Judged against the heaviest child of ``segment``."""


def classify_branches(
    forest: Forest,
    *,
    sampled: Jagged | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> tuple[Branch, ...]:
    """Name the cause of every branch: every child but the heaviest, and every row's end before others.

    Args:
        forest: the rows.
        sampled: [B, L_b], nonzero where the row's token was sampled from the model; None when unknown. A token
            counts as sampled when it was in any row.
        decode: text of token ids; None skips the search for retokenisation.

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
        cause = _cause(forest, int(first_child[parent]), child, was_sampled, decode)
        branches.append(Branch(segment=parent, child=child, cause=cause))
    for segment in np.flatnonzero((rows_that_end > 0) & (first_child >= 0)).tolist():
        branches.append(Branch(segment=segment, child=None, cause=BranchCause.PREFIX_END))
    return tuple(sorted(branches, key=lambda branch: (branch.segment, -1 if branch.child is None else branch.child)))


def count_causes(branches: Sequence[Branch]) -> dict[BranchCause, int]:
    """Number of branches of each cause that occurs, most frequent first."""
    return dict(Counter(branch.cause for branch in branches).most_common())


def _cause(
    forest: Forest,
    left: int,
    right: int,
    was_sampled: np.ndarray | None,
    decode: Callable[[Sequence[int]], str] | None,
) -> BranchCause:
    if decode is not None and _same_text(_continuation(forest, left), _continuation(forest, right), decode):
        return BranchCause.RETOKENISATION
    if was_sampled is None:
        return BranchCause.UNKNOWN
    sides = was_sampled[forest.segments.start[[left, right]]]
    if sides.all():
        return BranchCause.SAMPLING
    return BranchCause.CONTEXT_EDIT if sides.any() else BranchCause.OBSERVATION


def _continuation(forest: Forest, segment: int) -> list[int]:
    """The first ids of a segment and of its heaviest path, which follows it in the layout."""
    start, end = int(forest.segments.start[segment]), int(forest.segments.subtree_end[segment])
    window = np.arange(start, min(start + RETOKENISATION_WINDOW, end))
    on_path = forest.position[window] - forest.position[start] == window - start
    return forest.input_ids[window[on_path]].tolist()


def _same_text(left: list[int], right: list[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Whether some beginnings of both decode to one text that is not empty."""
    texts = {decode(left[:size]) for size in range(1, len(left) + 1)} - {""}
    return any(decode(right[:size]) in texts for size in range(1, len(right) + 1))
