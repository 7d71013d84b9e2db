"""The world of a session, as agents and trainer see it."""

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
    """True if the agent ended by itself; False when a limit ended it."""


class Environment(Protocol):
    """The world of one session. Built without arguments, one per session."""

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Set the world up for a task: the `extra_info` of the data set's row."""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Describe the tools, in OpenAI's function format, for the chat template."""

    async def call(self, call: ToolCall) -> str:
        """Execute a tool and return what the agent sees. Calls of one turn run concurrently.

        Mistakes of the agent (an unknown tool, bad arguments) are answered in words. `SandboxDied`, `SandboxError` and
        `OSError` lose the session; any other exception ends the agent's work, which is scored as it stands.
        """

    async def stop(self) -> None:
        """End everything that the session started; called before `score`, whatever ended the session.

        Nothing runs any more when this returns, and later calls of the agent are refused. A class whose tools start
        nothing may leave it out.
        """

    async def score(self, outcome: Outcome) -> float:
        """Return the session's reward, a finite number.

        Raises `ValueError` if what the agent left cannot be judged: the reward is 0.0. Any other exception loses the
        session.
        """

    async def close(self) -> None:
        """Release everything; called once, whatever happened. An exception is logged."""
