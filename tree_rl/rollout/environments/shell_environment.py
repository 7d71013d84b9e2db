"""An environment of files and a shell, and how an agent reads what a command did."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tree_rl.rollout.environments.environment import Outcome, ToolCall
from tree_rl.rollout.sandbox.confinement import Limits
from tree_rl.rollout.sandbox.workspace import CommandResult, Workspace

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


async def call_shell(call: ToolCall, run: Callable[[str], Awaitable[CommandResult]]) -> str:
    """Run a call of the tool `shell`, the only one that there is; answer the agent's mistakes in words."""
    command = call.arguments.get("command")
    if call.name != "shell":
        return f"error: unknown tool {call.name!r}; the only tool is shell"
    if not isinstance(command, str):
        return 'error: shell expects {"command": "..."}'
    return describe_result(await run(command))


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
        return await call_shell(call, self._workspace.run_async)

    async def score(self, outcome: Outcome) -> float:
        """Run the task's `check`. Raises `KeyError` if there is none."""
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
