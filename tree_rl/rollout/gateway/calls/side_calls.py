"""Calls beside the task: titles, summaries, commit messages, notes for a memory. Harnesses make them unasked.

Every recorded call that is one carries its name and a weight: 0 leaves its tokens out of training.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tree_rl.rollout.gateway.protocols.messages import ChatMessage

READ_CHARACTERS = 20_000
"""Characters of a text that are searched, from its beginning. Harnesses open their side calls with a text of their
own."""

MOST_WEIGHT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCall:
    """One kind of call, told apart by patterns: regular expressions, found anywhere, whatever the case.

    All patterns that are given must be found.

    Raises:
        ValueError: no pattern for a name that is not known, a pattern that is no regular expression, a weight below 0.
    """

    name: str
    """Name in reports and metrics: letters, digits and `_`."""
    weight: float = 1.0
    """What its tokens count in training: 0 leaves them out, 1 trains them as all others."""
    agent: str = ""
    """Pattern for the whole name of the agent that asks."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header -> pattern for its value."""
    system: str = ""
    """Pattern for a system text."""
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

    @property
    def has_pattern(self) -> bool:
        """Whether anything tells the call apart."""
        return bool(self.agent or self.headers or self.system or self.user)

    def matches(self, messages: Sequence[ChatMessage], *, agent: str, headers: Mapping[str, str]) -> bool:
        """Whether a request is such a call."""
        if self.agent and not re.fullmatch(self.agent, agent):
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
"""Side calls recognised by the texts of the harnesses' own prompts. They train as all other calls do, unless an option
says otherwise."""


def read_side_calls(given: Sequence[SideCall | Mapping[str, Any]]) -> tuple[SideCall, ...]:
    """Read the option: the given calls in front of the known ones.

    Raises:
        ValueError: an unknown key or a bad value, named.
    """
    calls = [one if isinstance(one, SideCall) else _read(one) for one in given]
    known = {one.name for one in KNOWN_SIDE_CALLS}
    # A tuple that was read before holds the known ones.
    own = [one for one in calls if one.has_pattern and replace(one, weight=1.0) not in KNOWN_SIDE_CALLS]
    weights = {one.name: one.weight for one in calls if one not in own}
    for name in weights:
        if name not in known:
            raise ValueError(
                f"side_calls.{name}: expected a pattern (agent, headers, system or user); without one, only the known "
                f"calls can be named: {', '.join(sorted(known))}"
            )
    return (*own, *(replace(one, weight=weights.get(one.name, one.weight)) for one in KNOWN_SIDE_CALLS))


def side_call_of(
    known: Sequence[SideCall], messages: Sequence[ChatMessage], *, agent: str, headers: Mapping[str, str]
) -> SideCall | None:
    """The first kind of call that a request is; None for the task itself."""
    return next((one for one in known if one.matches(messages, agent=agent, headers=headers)), None)


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text[:READ_CHARACTERS], re.IGNORECASE) is not None


def _read(given: Mapping[str, Any]) -> SideCall:
    names = [one.name for one in fields(SideCall)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"side_calls.{unknown[0]}: no such key; known are {', '.join(names)}")
    if not isinstance(given.get("name"), str):
        raise ValueError(f"side_calls: expected a name, received {given.get('name')!r}")
    return SideCall(**{**given, "headers": dict(given.get("headers") or {})})
