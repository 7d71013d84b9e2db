"""Side calls: harnesses also ask for titles, summaries, commit messages and notes for a memory.

A recorded side call has a name and a weight: 0 excludes its tokens from training.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tree_rl.option_types import check_options
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest

READ_CHARACTERS = 20_000
"""Number of characters that we search from the start of a text: side calls start with a fixed text."""
MOST_WEIGHT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCall:
    """One kind of call, recognised by patterns: regular expressions that match anywhere, ignoring case.

    All given patterns must match.

    Raises `ValueError` for a bad name, a pattern that is no regular expression, or a weight outside 0 to `MOST_WEIGHT`.
    """

    name: str
    """Name in reports and metrics: letters, digits and `_`."""
    weight: float = 1.0
    """Weight of its tokens in the loss: 0 excludes them, 1 trains them like all others."""
    agent: str = ""
    """Pattern for the whole name of the calling agent."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Pattern for the value of each header, by its name."""
    system: str = ""
    """Pattern for the text of any system message."""
    user: str = ""
    """Pattern for the last message, if it is a user's."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", self.name):
            raise ValueError(f"side_calls: name={self.name!r}: expected letters, digits and _")
        weight: Any = self.weight
        if not isinstance(weight, int | float) or not 0 <= weight <= MOST_WEIGHT:
            raise ValueError(f"side_calls.{self.name}.weight={weight!r}: expected a number from 0 to {MOST_WEIGHT}")
        for pattern in (self.agent, self.system, self.user, *self.headers.values()):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"side_calls.{self.name}: {pattern!r} is no regular expression: {error}") from error

    def matches(self, request: ChatRequest) -> bool:
        """True if a request is a call of this kind."""
        messages, headers = request.messages, request.headers
        if self.agent and not re.fullmatch(self.agent, request.agent):
            return False
        if not all(_found(pattern, headers.get(name.lower(), "")) for name, pattern in self.headers.items()):
            return False
        systems = (message.content for message in messages if message.role == "system")
        if self.system and not any(_found(self.system, text) for text in systems):
            return False
        last = messages[-1].content if messages and messages[-1].role == "user" else ""
        return not self.user or _found(self.user, last)


KNOWN_SIDE_CALLS = (
    # Claude Code, Qwen Code; opencode
    SideCall(name="title", system=r"Generate a concise, sentence-case title|succinct title and git branch name"),
    SideCall(name="title", system=r"You are a title generator\. You output ONLY a thread title"),
    # Claude Code; Codex; opencode; Qwen Code and Gemini CLI; OpenHands; aider
    SideCall(name="summary", user=r"Your task is to create a detailed summary of the conversation so far"),
    SideCall(name="summary", user=r"You are performing a CONTEXT CHECKPOINT COMPACTION"),
    SideCall(name="summary", user=r"(Create a new|Update the) anchored summary"),
    SideCall(name="summary", system=r"You are a context summarization agent|component that summarizes internal chat"),
    SideCall(name="summary", system=r"^\s*\*Briefly\* summarize this partial conversation about programming"),
    SideCall(name="summary", user=r"You are maintaining a context-aware state summary for an interactive agent"),
    # aider
    SideCall(name="commit_message", system=r"generates concise,\s+one-line Git commit messages"),
    # Claude Code; Gemini CLI
    SideCall(name="memory", user=r"You are now acting as the memory extraction subagent"),
    SideCall(name="memory", system=r"You are an Auto Memory Extraction Agent|expert Context Memory Manager"),
    # Qwen Code, Gemini CLI: who speaks next
    SideCall(
        name="next_speaker", user=r"Analyze \*only\* the content and structure of your immediately preceding response"
    ),
)
"""Side calls recognised by the harnesses' prompts. They have weight 1 unless an option changes it."""


def read_side_calls(given: Sequence[SideCall | Mapping[str, Any]]) -> tuple[SideCall, ...]:
    """Read the option `side_calls`: the given kinds come before the known ones. Errors name the key and the value."""
    calls = [one if isinstance(one, SideCall) else _read(one) for one in given]
    known = {one.name for one in KNOWN_SIDE_CALLS}
    # A tuple that was already read contains the known ones.
    patterned = [one for one in calls if one.agent or one.headers or one.system or one.user]
    own = [one for one in patterned if replace(one, weight=1.0) not in KNOWN_SIDE_CALLS]
    weights = {one.name: one.weight for one in calls if one not in own}
    for name in weights:
        if name not in known:
            raise ValueError(
                f"side_calls.{name}: expected a pattern (agent, headers, system or user); without one, only the known "
                f"calls can be named: {', '.join(sorted(known))}"
            )
    return (*own, *(replace(one, weight=weights.get(one.name, one.weight)) for one in KNOWN_SIDE_CALLS))


def side_call_of(known: Sequence[SideCall], request: ChatRequest) -> SideCall | None:
    """The first kind that matches a request; None for a call of the task itself."""
    return next((one for one in known if one.matches(request)), None)


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text[:READ_CHARACTERS], re.IGNORECASE) is not None


def _read(given: Mapping[str, Any]) -> SideCall:
    given = {"name": None, **given, "headers": dict(given.get("headers") or {})}
    check_options("side_calls", given, SideCall)
    return SideCall(**given)
