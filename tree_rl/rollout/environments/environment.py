"""The world of a session, as agents and trainer see it: four methods and `close`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    """Tool name."""
    arguments: Mapping[str, Any]
    """Decoded JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a session went, for scoring."""

    answer: str
    """Text of the last turn, reasoning removed."""
    turns: int
    """Model calls on the main line."""
    malformed_calls: int
    """Tool calls that could not be read."""
    is_complete: bool
    """Whether the agent ended by itself; False when a limit ended it."""


class Environment(Protocol):
    """The world of one session. Built without arguments, one per session."""

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Set the world up for a task: the `extra_info` of the data set's row."""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Describe the tools, in OpenAI's function format, for the chat template."""

    async def call(self, call: ToolCall) -> str:
        """Execute a tool and return what the agent sees. Calls of one turn run concurrently.

        Mistakes of the agent (an unknown tool, bad arguments) are answered in words; an exception fails the session.
        """

    async def score(self, outcome: Outcome) -> float:
        """Return the session's reward."""

    async def close(self) -> None:
        """Release everything; called once, whatever happened."""
