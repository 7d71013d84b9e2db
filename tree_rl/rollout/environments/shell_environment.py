"""An environment of files and a shell, and how an agent reads what a command did."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
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
    `check`: a shell command run at the end on a copy of the directory, reward 1.0 if it exits with 0. Subclass and
    replace `score` for another reward: `workspace.read` reads a file, and commands run in `judge_workspace()`.
    """

    limits = Limits()

    def __init__(self) -> None:
        self.workspace: Workspace | None = None
        """Where the agent works; stopped before `score`."""
        self.task: Mapping[str, Any] = {}
        self._judge: Workspace | None = None

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Write the task's files."""
        files = task.get("files") or {}
        if not isinstance(files, Mapping):
            files = {entry["path"]: entry["content"] for entry in files}
        self.task = task
        # A column of a data set holds every key that any row has; absent files arrive as None.
        present = {path: content for path, content in files.items() if content is not None}

        def make() -> None:
            self.workspace = Workspace(present, limits=self.limits)

        await _in_thread(make)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Describe `shell`."""
        return [SHELL_TOOL]

    async def call(self, call: ToolCall) -> str:
        """Run `shell(command)`."""
        return await call_shell(call, self._workspace.run_async)

    async def stop(self) -> None:
        """Kill what commands started. Later calls raise `SandboxDied`."""
        if self.workspace is not None:
            await _in_thread(self.workspace.stop)

    async def judge_workspace(self) -> Workspace:
        """A directory of another user with a copy of the agent's files; nothing of the agent's runs or writes there.

        Raises:
            ValueError: the agent's files cannot be copied.
            SandboxError: this machine has no place that the agent could not reach.
        """
        await self.stop()
        if self._judge is None:
            await _in_thread(self._make_judge)
        assert self._judge is not None
        return self._judge

    def _make_judge(self) -> None:
        judge = self._workspace.fresh()
        try:
            self._workspace.copy_to(judge, leave_out=lambda path: False)
        except BaseException:
            judge.close()
            raise
        self._judge = judge

    async def score(self, outcome: Outcome) -> float:
        """Run the task's `check`. Raises `RuntimeError` if there is none."""
        if "check" not in self.task:
            raise RuntimeError(
                "extra_info.check: ShellEnvironment expects a shell command that tells success by its exit code"
            )
        judge = await self.judge_workspace()
        return float((await judge.run_async(self.task["check"])).exit_code == 0)

    async def close(self) -> None:
        """Remove the files."""
        for workspace in (self._judge, self.workspace):
            if workspace is not None:
                await _in_thread(workspace.close)

    @property
    def _workspace(self) -> Workspace:
        if self.workspace is None:
            raise RuntimeError("ShellEnvironment used before reset()")
        return self.workspace


async def _in_thread(work: Callable[[], None]) -> None:
    """Do work with files or processes. A cancelled caller waits for its end, so that `close` finds what it made."""
    working = asyncio.get_running_loop().run_in_executor(_file_threads(), work)
    try:
        await asyncio.shield(working)
    finally:
        if not working.done():
            await asyncio.wait({working})


@cache
def _file_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=2 * (os.cpu_count() or 1), thread_name_prefix="workspace-files")
