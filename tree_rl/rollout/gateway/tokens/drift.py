"""Drift: the same text with different token ids.

The model's text, decoded and tokenized again, often gets other ids than the model sampled. A prompt with those ids is a
different context.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from tree_rl.rollout.gateway.dialects.dialect import CallFault
from tree_rl.rollout.transcript import ModelCall
from tree_rl.tree import Forest

DriftKind = Literal["retokenized", "rewritten"]
BranchCause = Literal["reasoning_dropped", "rewritten", "edited", "other_end"]
WINDOW_TOKENS = 64
"""Number of tokens within which two tokenizations of one text must meet again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """The drift of a session."""

    returned: Mapping[int, DriftKind] = field(default_factory=dict)
    """Calls whose turns came back as a text that tokenizes to other ids than the model sampled. retokenized: equal text
    has other ids. rewritten: the template changes the text, such as spaces in the arguments of a tool call."""
    was_reused: bool = True
    """True if later prompts kept the model's ids (`on_drift=reuse`)."""
    siblings: tuple[tuple[int, int], ...] = ()
    """Pairs of calls that branch only because one text has two tokenizations."""
    branch_causes: Mapping[int, BranchCause] = field(default_factory=dict)
    """Why a call's turn, sent back, still branched: the prompt does not continue its tokens. reasoning_dropped:
    the template drops the turn's reasoning. rewritten: it renders the turn, or something before it, differently.
    edited: the client changed the turn's text or tool calls. other_end: the model ended the turn with another token
    than the template, or with a stop text."""
    guessed: tuple[int, ...] = ()
    """Calls whose turns were chosen, as the latest, among turns with the same text but different reasoning."""
    unread: Mapping[int, CallFault] = field(default_factory=dict)
    """Fault by the call whose turn has a tool call that stayed text, or that is inside open reasoning."""

    def figures(self) -> dict[str, int]:
        """Number of each kind of event, by the metric's name. Every report has all names."""
        kinds = Counter(self.returned.values())
        causes = Counter(self.branch_causes.values())
        faults = Counter(self.unread.values())
        return {
            "drift_avoided": len(self.returned) if self.was_reused else 0,
            **{f"drift_returned_{kind}": kinds[kind] for kind in get_args(DriftKind)},
            "drift_branches": len(self.siblings),
            **{f"drift_{cause}": causes[cause] for cause in get_args(BranchCause)},
            "drift_guessed": len(self.guessed),
            "drift_unread": len(self.unread),
            **{f"drift_unread_{fault}": faults[fault] for fault in get_args(CallFault)},
        }


def find_drifted_siblings(
    calls: Sequence[ModelCall], decode: Callable[[Sequence[int]], str]
) -> tuple[tuple[int, int], ...]:
    """The pairs of calls at branches of a session's token trie between two tokenizations of one text."""
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
        for left, right in _pairs_to_compare(windows, decode):
            if _meet(windows[left], windows[right], decode):
                found.append((min(owners[left], owners[right]), max(owners[left], owners[right])))
    return tuple(found)


def _pairs_to_compare(
    windows: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> list[tuple[int, int]]:
    """Pairs that may be tokenizations of one text: the first characters of one are a prefix of the other's.

    Comparing all pairs would take minutes for a thousand branches.
    """
    beginnings = [_first_characters(window, decode) for window in windows]
    with_beginning: dict[str, list[int]] = defaultdict(list)
    for index, beginning in enumerate(beginnings):
        with_beginning[beginning].append(index)
    pairs = set()
    for index, beginning in enumerate(beginnings):
        for length in range(1, len(beginning) + 1):
            others = with_beginning.get(beginning[:length], ())
            pairs |= {(min(other, index), max(other, index)) for other in others if other != index}
    return sorted(pairs)


def _first_characters(window: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Text of the shortest prefix that ends with a complete character; empty if none does."""
    texts = (decode(window[:count]) for count in range(1, len(window) + 1))
    return next((text for text in texts if text and not text.endswith("\ufffd")), "")


def _meet(left: Sequence[int], right: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """True if both have the same text up to some token of each."""
    left_count = right_count = 1
    while left_count <= min(len(left), WINDOW_TOKENS) and right_count <= min(len(right), WINDOW_TOKENS):
        left_text, right_text = decode(left[:left_count]), decode(right[:right_count])
        if left_text == right_text and not left_text.endswith("\ufffd"):
            return True
        shorter, longer = sorted((left_text.rstrip("\ufffd"), right_text.rstrip("\ufffd")), key=len)
        if not longer.startswith(shorter):
            return False
        if len(left_text) <= len(right_text):
            left_count += 1
        else:
            right_count += 1
    return False
