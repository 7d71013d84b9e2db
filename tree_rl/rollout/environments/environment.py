"""The interface of a session's environment, for agents and the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One tool call of the model."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any]
    """Arguments, decoded from JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What `TaskAgent.run` returns: the end of an agent's work, which `Environment.score` rewards."""

    answer: str
    """Text of the last turn without reasoning."""
    turns: int
    """Number of model calls on the main line."""
    malformed_calls: int
    """Number of tool calls that could not be read."""
    is_complete: bool
    """True if the agent ended by itself; False if a limit ended it."""
    credit: Mapping[str, Any] = field(default_factory=dict)
    """Report to credit estimators; see `AgentResult.credit`."""


def tool(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool in OpenAI's function format."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_tool(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    """A tool whose one parameter is a text."""
    properties = {parameter: {"type": "string", "description": meaning}}
    return tool(name, description, {"type": "object", "properties": properties, "required": [parameter]})


class Environment(Protocol):
    """The environment of one session. Built once per session, from its options if its constructor takes any."""

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Set up a task, given by the `extra_info` of the data set's row."""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Describe the tools, in OpenAI's function format, for the chat template."""

    async def call(self, call: ToolCall) -> str:
        """Execute a tool and return what the agent sees. Calls of one turn run concurrently.

        Return a message for mistakes of the agent (an unknown tool, bad arguments). `SandboxError` loses the session,
        `SandboxDied` ends it with reward 0.0. Any other exception ends the agent's work, which is scored as it is.
        """

    async def save(self, folder: Path) -> bool:
        """Copy the whole state into an empty folder, for `restore`; False if there is no exact copy.

        Called between tool calls. Optional, as `restore`: without them branches execute the calls before them again.
        """

    async def restore(self, task: Mapping[str, Any], folder: Path) -> None:
        """Set up a task as `reset` does, in the state that `save` copied."""

    async def stop(self) -> None:
        """End everything that the session started; always called before `score`.

        Nothing runs when this returns, and later calls of the agent are refused. Optional for a class whose tools start
        no processes.
        """

    async def score(self, outcome: Outcome) -> float:
        """Return the session's reward, a finite number.

        Raises `ValueError` if the agent's work cannot be judged: then the reward is 0.0. So it is after `SandboxDied`,
        and after other errors that an agent's files can cause (`in_environment.MISJUDGED`). Any other exception loses
        the session.
        """

    async def close(self) -> None:
        """Release everything; always called once. An exception is logged."""
