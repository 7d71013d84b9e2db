"""What an agent acts on: four methods, and an environment whose tool is a shell in a workspace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tree_rl.rollout.confinement import Limits
from tree_rl.rollout.workspace import CommandResult, Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    """Tool name."""
    arguments: Mapping[str, Any]
    """Decoded JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What is known of a session when it is scored."""

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
        """Set the world up.

        Args:
            task: the `extra_info` of the data set's row.
        """

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


SHELL_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a POSIX shell command in the working directory and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command line."}},
            "required": ["command"],
        },
    },
}


def describe_result(result: CommandResult) -> str:
    """What an agent reads of a command: the output, and whether it was cut, took too long or failed."""
    notes = [
        "[output cut]" if result.truncated else "",
        "[timed out]" if result.timed_out else f"[exit {result.exit_code}]" if result.exit_code else "",
    ]
    return "\n".join(part for part in (result.output.rstrip("\n"), *notes) if part)


class ShellEnvironment:
    """Files and a shell; the reward is whether a checking command succeeds.

    The task gives `files` (a mapping of path to content, or a list of `{path, content}` as data sets store it) and
    `check`: a shell command run at the end in the same directory, reward 1.0 if it exits with 0. Subclass and replace
    `score` for another reward.
    """

    limits = Limits()

    def __init__(self) -> None:
        self.workspace: Workspace | None = None
        self.task: Mapping[str, Any] = {}

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Write the task's files."""
        files = task.get("files") or {}
        if not isinstance(files, Mapping):
            files = {entry["path"]: entry["content"] for entry in files}
        self.task = task
        # A column of a data set holds every key that any row has; absent files arrive as None.
        present = {path: content for path, content in files.items() if content is not None}
        self.workspace = Workspace(present, limits=self.limits)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Describe `shell`."""
        return [SHELL_TOOL]

    async def call(self, call: ToolCall) -> str:
        """Run `shell(command)`."""
        command = call.arguments.get("command")
        if call.name != "shell":
            return f"error: unknown tool {call.name!r}; the only tool is shell"
        if not isinstance(command, str):
            return 'error: shell expects {"command": "..."}'
        return describe_result(await self._workspace.run_async(command))

    async def score(self, outcome: Outcome) -> float:
        """Run the task's `check`.

        Raises:
            KeyError: the task has none.
        """
        if "check" not in self.task:
            raise KeyError(
                "extra_info.check: ShellEnvironment expects a shell command that tells success by its exit code"
            )
        return float((await self._workspace.run_async(self.task["check"])).exit_code == 0)

    async def close(self) -> None:
        """Remove the files."""
        if self.workspace is not None:
            self.workspace.close()

    @property
    def _workspace(self) -> Workspace:
        if self.workspace is None:
            raise RuntimeError("ShellEnvironment used before reset()")
        return self.workspace
