"""An environment with files and a shell, and the text of a command's result for the agent."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tree_rl.rollout.environments.environment import Outcome, ToolCall, text_tool
from tree_rl.rollout.sandbox.local_sandbox import LocalSandbox
from tree_rl.rollout.sandbox.sandbox import KEY, SandboxOptions
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult

SHELL_TOOL = text_tool(
    "shell", "Run a POSIX shell command in the working directory and return its output.", "command", "The command line."
)


def describe_result(result: CommandResult) -> str:
    """A command's result for the agent: the output, and notes if it was cut, took too long or failed."""
    notes = [
        "[output cut]" if result.truncated else "",
        "[timed out]" if result.timed_out else f"[exit {result.exit_code}]" if result.exit_code else "",
    ]
    return "\n".join(part for part in (result.output.rstrip("\n"), *notes) if part)


async def call_shell(call: ToolCall, run: Callable[[str], Awaitable[CommandResult]]) -> str:
    """Run a call of `shell`, the only tool; return a message for mistakes of the agent."""
    command = call.arguments.get("command")
    if call.name != "shell":
        return f"error: unknown tool {call.name!r}; the only tool is shell"
    if not isinstance(command, str):
        return 'error: shell expects {"command": "..."}'
    return describe_result(await run(command))


def is_unchanged(environment: object, base: type) -> bool:
    """True if a subclass cannot keep state outside the sandbox: it has the `reset` and `call` of its base."""
    return all(getattr(type(environment), name) is getattr(base, name) for name in ("reset", "call"))


class ShellEnvironment:
    """Files and a shell; a command at the end decides the reward.

    A task has `files` (a mapping of path to content, or a list of `{path, content}` as data sets store it) and `check`:
    a shell command that runs at the end on a copy of the directory, with reward 1.0 if it exits with 0. Override
    `score` for another reward: `await self.sandbox.read(name)` reads a file, and commands run in
    `await self.judge_sandbox()`.

    Raises:
        ValueError: a back end other than `local`.
    """

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        if self.options.backend != "local":
            raise ValueError(f"{KEY}.backend={self.options.backend}: expected local; this environment has no image")
        self.sandbox = LocalSandbox(self.options)
        """The agent's sandbox; stopped before `score`."""
        self.task: Mapping[str, Any] = {}
        self._judge: LocalSandbox | None = None

    async def reset(self, task: Mapping[str, Any]) -> None:
        files = task.get("files") or {}
        if not isinstance(files, Mapping):
            files = {entry["path"]: entry["content"] for entry in files}
        self.task = task
        await self.sandbox.start()
        # A column of a data set has the keys of all rows; a row's absent files are None.
        await self.sandbox.write({path: content for path, content in files.items() if content is not None})

    async def save(self, folder: Path) -> bool:
        return is_unchanged(self, ShellEnvironment) and await self.sandbox.save(folder)

    async def restore(self, task: Mapping[str, Any], folder: Path) -> None:
        self.task = task
        await self.sandbox.restore(folder)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [SHELL_TOOL]

    async def call(self, call: ToolCall) -> str:
        return await call_shell(call, self.sandbox.run)

    async def stop(self) -> None:
        await self.sandbox.stop()

    async def judge_sandbox(self) -> LocalSandbox:
        """Another sandbox with a copy of the agent's files. Raises `ValueError` if they cannot be copied."""
        await self.stop()
        if self._judge is None:
            self._judge = self.sandbox.fresh()
            await self._judge.start()
            await self.sandbox.copy_to(self._judge, leave_out=lambda path: False)
        return self._judge

    async def score(self, outcome: Outcome) -> float:
        """Run the task's `check`. Raises `RuntimeError` if there is none."""
        check = self.task.get("check")
        if not isinstance(check, str):
            raise RuntimeError(f"extra_info.check={check!r}: expected a shell command whose exit code tells success")
        judge = await self.judge_sandbox()
        return float((await judge.run(check)).exit_code == 0)

    async def close(self) -> None:
        for sandbox in (self._judge, self.sandbox):
            if sandbox is not None:
                await sandbox.close()
