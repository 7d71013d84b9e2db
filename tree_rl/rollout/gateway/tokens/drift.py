"""Drift: equal text with other token ids.

Text of the model, decoded and tokenized again, often has other ids than the model drew. With them the next prompt is
another context.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tree_rl.rollout.gateway.dialects.dialect import CallFault
from tree_rl.rollout.transcript import ModelCall
from tree_rl.tree import Forest

DriftKind = Literal["retokenized", "rewritten"]
LeftCause = Literal["reasoning_dropped", "rewritten", "edited", "other_end"]
WINDOW_TOKENS = 64
"""Two spellings of one text must agree again within so many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnedTurn:
    """A generated turn in a later prompt, whose text tokenizes to other ids than the model drew."""

    session: str
    call: int
    """The call that generated the turn."""
    position: int
    """First differing token, counted from the start of the call's prompt."""
    text: str
    """What the model wrote there, up to where both spellings agree again."""
    kind: DriftKind
    """retokenized: equal text has other ids. rewritten: the template changes the text, such as spaces in the arguments
    of a tool call."""
    was_reused: bool
    """True if the later prompt kept the model's ids (`on_drift=reuse`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftedSiblings:
    """Two calls of a session that branch where one text has two spellings in ids."""

    session: str
    calls: tuple[int, int]
    position: int
    """First differing token, counted from the start of either sequence."""
    text: str
    """The text of both spellings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftTurn:
    """A turn that came back and that the prompt does not continue: a branch."""

    session: str
    call: int
    """The call that generated the turn."""
    cause: LeftCause
    """reasoning_dropped: the template leaves the turn's reasoning out. rewritten: it writes the turn, or something in
    front of it, otherwise. edited: the client changed its text or its tool calls. other_end: the model ended it with
    another token, or a stop text, than the template does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadCall:
    """A turn with a tool call that its dialect could not read, or that stands in open reasoning."""

    session: str
    call: int
    """The call that generated the turn."""
    cause: CallFault


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """The drift of a session."""

    returned: tuple[ReturnedTurn, ...]
    """Turns that would have drifted. Each is reported once, where it first came back."""
    siblings: tuple[DriftedSiblings, ...]
    """Branches of the session's token trie that only drift causes."""
    left: tuple[LeftTurn, ...] = ()
    """Turns that came back and yet begin a branch. Each is reported once."""
    guessed: tuple[int, ...] = ()
    """Calls whose turns were taken for the latest of several that read alike but have other reasoning."""
    unread: tuple[UnreadCall, ...] = ()
    """Turns with a tool call that stayed text, or that stands in open reasoning."""

    @property
    def num_avoided(self) -> int:
        """Number of turns whose ids were kept although their text has other ids."""
        return sum(turn.was_reused for turn in self.returned)

    def figures(self) -> dict[str, int]:
        """How often everything in it happened, by names for metrics. Every report has all of them."""
        kinds = Counter(turn.kind for turn in self.returned)
        causes = Counter(turn.cause for turn in self.left)
        faults = Counter(call.cause for call in self.unread)
        return {
            "drift_avoided": self.num_avoided,
            **{f"drift_returned_{kind}": kinds[kind] for kind in get_args(DriftKind)},
            "drift_branches": len(self.siblings),
            **{f"drift_{cause}": causes[cause] for cause in get_args(LeftCause)},
            "drift_guessed": len(self.guessed),
            "drift_unread": len(self.unread),
            **{f"drift_unread_{fault}": faults[fault] for fault in get_args(CallFault)},
        }


def first_difference(
    generated: Sequence[int], again: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[int, str] | None:
    """Where two spellings of a turn differ.

    Args:
        generated: ids that the model drew.
        again: ids of its text in the later prompt.

    Returns:
        Index of the first differing token, and the model's text from there to where both agree again. None if all ids
        are equal.
    """
    start = _common_prefix(generated, again)
    if start == len(generated) == len(again):
        return None
    left, right = generated[start:], again[start:]
    meeting = _meeting(left, right, decode)
    return start, decode(left[: meeting or WINDOW_TOKENS])


def find_drifted_siblings(
    session: str, calls: Sequence[ModelCall], decode: Callable[[Sequence[int]], str]
) -> tuple[DriftedSiblings, ...]:
    """Find branches of a session's token trie between two spellings of one text."""
    sequences = [np.array(call.prompt_ids + call.response_ids, dtype=np.int64) for call in calls]
    if not sequences:
        return ()
    forest = Forest.from_rows(sequences)
    segments = forest.segments
    found = []
    for parent in np.unique(segments.parent).tolist():
        children = np.flatnonzero(segments.parent == parent)
        position = int(segments.depth[children[0]])
        owners = [int(forest.rows_through(int(segments.start[child]))[0]) for child in children]
        windows = [sequences[owner][position : position + WINDOW_TOKENS].tolist() for owner in owners]
        for left, right in _begin_alike(windows, decode):
            meeting = _meeting(windows[left], windows[right], decode)
            if meeting:
                first, second = sorted((owners[left], owners[right]))
                text = decode(windows[left][:meeting])
                found.append(DriftedSiblings(session=session, calls=(first, second), position=position, text=text))
    return tuple(found)


def _begin_alike(windows: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]) -> list[tuple[int, int]]:
    """Pairs of spellings that may meet: the first whole characters of one begin the text of the other.

    Spellings of one text begin so. Comparing all pairs takes minutes for a thousand branches.
    """
    beginnings = [_first_characters(window, decode) for window in windows]
    with_beginning: dict[str, list[int]] = defaultdict(list)
    for index, beginning in enumerate(beginnings):
        with_beginning[beginning].append(index)
    pairs = set()
    for index, beginning in enumerate(beginnings):
        for length in range(1, len(beginning) + 1):
            alike = with_beginning.get(beginning[:length], ())
            pairs |= {(min(other, index), max(other, index)) for other in alike if other != index}
    return sorted(pairs)


def _first_characters(window: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Text of the fewest tokens that end with a whole character; empty if none do."""
    texts = (decode(window[:count]) for count in range(1, len(window) + 1))
    return next((text for text in texts if text and not text.endswith("\ufffd")), "")


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    different = (index for index, (left, right) in enumerate(zip(a, b, strict=False)) if left != right)
    return next(different, min(len(a), len(b)))


def _meeting(left: Sequence[int], right: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Number of tokens of `left` after which both spell the same text. None if the texts differ."""
    left_count = right_count = 1
    while left_count <= min(len(left), WINDOW_TOKENS) and right_count <= min(len(right), WINDOW_TOKENS):
        left_text, right_text = decode(left[:left_count]), decode(right[:right_count])
        if left_text == right_text and not left_text.endswith("\ufffd"):
            return left_count
        shorter, longer = sorted((left_text.rstrip("\ufffd"), right_text.rstrip("\ufffd")), key=len)
        if not longer.startswith(shorter):
            return None
        if len(left_text) <= len(right_text):
            left_count += 1
        else:
            right_count += 1
    return None
