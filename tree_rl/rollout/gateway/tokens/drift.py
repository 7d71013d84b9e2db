"""Drift: the same text with different token ids.

The model's text, decoded and tokenized again, often gets other ids than the model sampled. A prompt with those ids is a
different context.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
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
    found: set[tuple[int, int]] = set()
    for parent in np.unique(segments.parent).tolist():
        children = np.flatnonzero(segments.parent == parent)
        position = int(segments.depth[children[0]])
        owners = [int(forest.rows_through(int(segments.start[child]))[0]) for child in children]
        owners_of_text: dict[str, list[int]] = defaultdict(list)
        for owner in owners:
            for text in _whole_texts(sequences[owner][position : position + WINDOW_TOKENS].tolist(), decode):
                owners_of_text[text].append(owner)
        found |= {pair for same in owners_of_text.values() for pair in combinations(sorted(same), 2)}
    return tuple(sorted(found))


def _whole_texts(window: Sequence[int], decode: Callable[[Sequence[int]], str]) -> set[str]:
    """The texts of a window's prefixes that end with a complete character."""
    texts = {decode(window[:count]) for count in range(1, len(window) + 1)}
    return {text for text in texts if text and not text.endswith("\ufffd")}
