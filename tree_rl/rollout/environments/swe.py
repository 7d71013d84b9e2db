"""The software environment: a repository in a sandbox, a shell as tool, and tests that decide the reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tree_rl.rollout.environments.environment import Outcome, ToolCall
from tree_rl.rollout.environments.shell_environment import SHELL_TOOL, call_shell, is_unchanged
from tree_rl.rollout.environments.swe_judge import in_repository, judge_session, lay_out
from tree_rl.rollout.environments.swe_reports import TestReport
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.local_sandbox import LocalSandbox
from tree_rl.rollout.sandbox.open_sandbox import open_sandbox
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxDied, SandboxOptions
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult


class SweEnvironment:
    """One software task. Implements `tree_rl.rollout.environments.environment.Environment`.

    The default sandbox needs no Docker. Raises `SandboxDied` if the sandbox does not answer.
    """

    def __init__(self, options: SandboxOptions | None = None) -> None:
        self.options = options or SandboxOptions()
        self.report: TestReport | None = None
        self._task: SweTask | None = None
        self._sandbox: Sandbox | None = None

    def task_of(self, task: Mapping[str, Any]) -> SweTask:
        """Read a row's task, whose key `swe` holds the fields of `SweTask`. Raises `ValueError` if it is incomplete."""
        if task.get("swe") is None:
            raise ValueError(f"extra_info: expected the key 'swe' with a software task, received {sorted(task)}")
        return SweTask.from_row(task["swe"])

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Start the sandbox and write the repository. Raises as `task_of`, and `SandboxError` if it does not start."""
        self._task = self.task_of(task)
        self._sandbox = open_sandbox(self.options, image=self._task.image, directory=self._task.directory)
        # Raises before the session if there could be no separate sandbox for judging.
        self._sandbox.fresh()
        await self._sandbox.start()
        await lay_out(self._task, self._sandbox)

    async def save(self, folder: Path) -> bool:
        sandbox, _ = self._running
        return isinstance(sandbox, LocalSandbox) and is_unchanged(self, SweEnvironment) and await sandbox.save(folder)

    async def restore(self, task: Mapping[str, Any], folder: Path) -> None:
        self._task = self.task_of(task)
        self._sandbox = LocalSandbox(self.options)
        await self._sandbox.restore(folder)

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [SHELL_TOOL]

    async def run(self, command: str) -> CommandResult:
        """Execute a shell command in the repository, for agents with their own tools."""
        sandbox, task = self._running
        return await in_repository(task, sandbox, command)

    @property
    def has_model_port(self) -> bool:
        return self._running[0].has_model_port

    async def run_agent(
        self, command: str, *, variables: Mapping[str, str], gateway: tuple[str, int], port: int, limits: Limits
    ) -> CommandResult:
        sandbox, task = self._running
        command = f"{task.prelude}\n{command}" if task.prelude else command
        return await sandbox.run_agent(command, variables=variables, gateway=gateway, port=port, limits=limits)

    async def call(self, call: ToolCall) -> str:
        return await call_shell(call, self.run)

    async def stop(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.stop()

    async def score(self, outcome: Outcome) -> float:
        """Run the tests on a copy of the files in a new sandbox: 1.0 if all that count pass, else 0.0.

        Stores their result in `report`. Raises `SandboxError` or `SandboxDied` if the new sandbox fails.
        """
        sandbox, task = self._running
        await sandbox.stop()
        self.report = await judge_session(task, sandbox, sandbox.fresh())
        return float(self.report.is_solved)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    @property
    def _running(self) -> tuple[Sandbox, SweTask]:
        if self._sandbox is None or self._task is None:
            raise SandboxDied("SweEnvironment used before reset()")
        return self._sandbox, self._task
