"""Judges a software task in a new sandbox: writes the task again, copies the agent's files, and runs the tests.

Nothing that the agent started runs there; its code runs only in tests.
"""

import posixpath
import secrets
import shlex
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from tree_rl.rollout.environments.cases import RUNNER_NAME as CASE_RUNNER
from tree_rl.rollout.environments.cases import passed_cases, programs_for_child
from tree_rl.rollout.environments.suite_judge import folders_above_tests, left_out_of_suite, run_suite
from tree_rl.rollout.environments.swe_reports import REPORT_CHARACTERS, TestReport, is_full_reward, report_of
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxDied, SandboxError
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult

NEVER_COPIED = {".git", "__pycache__"}
NEVER_COPIED_ENDINGS = (".pyc", ".pth", ".egg-info", ".dist-info", ".egg")


async def judge_session(task: SweTask, agent_sandbox: Sandbox, judge_sandbox: Sandbox) -> TestReport:
    """Run the task's tests on a copy of the agent's files.

    Failures that the agent may have caused (files that cannot be copied, tests that cannot be written, a time-out) give
    a report without passed tests.

    Args:
        agent_sandbox: the agent's sandbox, stopped.
        judge_sandbox: an unstarted sandbox from `agent_sandbox.fresh()`; closed here.

    Raises:
        SandboxError: the judge's sandbox fails before the agent's files are in it.
        SandboxDied: it fails later.
    """
    try:
        leave_out = await _start(task, judge_sandbox)
        try:
            await agent_sandbox.copy_to(judge_sandbox, leave_out=leave_out)
        except ValueError as error:
            return report_of(task, (), f"the agent's files could not be copied: {error}")
        try:
            return await _run_tests(task, judge_sandbox)
        except ValueError as error:
            return report_of(task, (), f"the tests could not be written: {error}")
    finally:
        await judge_sandbox.close()


async def _start(task: SweTask, judge_sandbox: Sandbox) -> Callable[[str], bool]:
    """Start the judge's sandbox and write the task; return which of the agent's files not to copy."""
    leave_out = leave_out_rule(task)
    try:
        await judge_sandbox.start()
        # Without a setup only files that we do not copy, as the agent may have deleted others.
        await lay_out(task, judge_sandbox, None if task.setup else leave_out)
        if task.image is None:
            return leave_out
        folders = [".", *(f"./{folder}" for folder in sorted(folders_above_tests(task)))]
        listed = await judge_sandbox.run(f"find {shlex.join(folders)} -maxdepth 1")
        return leave_out_rule(task, [posixpath.normpath(path) for path in listed.output.splitlines()])
    except SandboxDied as error:
        raise SandboxError(f"the judge's sandbox died before the agent's files came: {error}") from error


async def lay_out(task: SweTask, sandbox: Sandbox, wanted: Callable[[str], bool] | None = None) -> None:
    """Write those paths of the repository for which `wanted` is true (None: all), and run the task's setup.

    Raises `SandboxError` if the setup fails.
    """
    await sandbox.write({path: text for path, text in task.files.items() if wanted is None or wanted(path)})
    if task.setup:
        done = await in_repository(task, sandbox, task.setup)
        if done.exit_code != 0:
            raise SandboxError(f"task {task.instance_id}: setup failed: {done.output[-1000:]}")


async def in_repository(task: SweTask, sandbox: Sandbox, command: str) -> CommandResult:
    """Execute a command after the task's prelude."""
    return await sandbox.run(f"{task.prelude}\n{command}" if task.prelude else command)


async def _run_tests(task: SweTask, sandbox: Sandbox) -> TestReport:
    if task.before_tests:
        await in_repository(task, sandbox, task.before_tests)
    await sandbox.write(task.test_files)
    if task.test_patch:
        patch = f".{secrets.token_hex(8)}.patch"
        await sandbox.write({patch: task.test_patch})
        await in_repository(task, sandbox, f"git apply {patch}; rm -f {patch}")
    if task.log_format == "cases":
        return await _run_cases(task, sandbox)
    if task.log_format == "reward_file":
        return await _run_verifier(task, sandbox)
    return await run_suite(task, sandbox, partial(in_repository, task, sandbox))


async def _run_cases(task: SweTask, sandbox: Sandbox) -> TestReport:
    runner, programs_file = (f".{secrets.token_hex(8)}{suffix}" for suffix in (".py", ".json"))
    programs, key = programs_for_child(task.cases)
    program = Path(__file__).with_name(CASE_RUNNER).read_text(encoding="utf-8")
    await sandbox.write({runner: program, programs_file: programs})
    result = await in_repository(task, sandbox, f"python3 -I -B {runner} {programs_file}")
    return report_of(task, passed_cases(task.cases, key, result.output), result.output[-REPORT_CHARACTERS:])


async def _run_verifier(task: SweTask, sandbox: Sandbox) -> TestReport:
    """Run the task's verifier and read its reward, after deleting reward files of the image or the agent."""
    await in_repository(task, sandbox, f"rm -rf {shlex.join(task.reward_files)}")
    result = await in_repository(task, sandbox, task.test_command)
    said = [(await in_repository(task, sandbox, f"head -c 1000 {shlex.quote(path)}")) for path in task.reward_files]
    is_full = not result.timed_out and any(one.exit_code == 0 and is_full_reward(one.output) for one in said)
    return report_of(task, task.fail_to_pass if is_full else (), result.output[-REPORT_CHARACTERS:])


def leave_out_rule(task: SweTask, present: Collection[str] = ()) -> Callable[[str], bool]:
    """A function that returns True for files of the agent that are not copied: of git, of Python's caches, and those of
    `left_out_of_suite`."""
    if task.log_format in ("cases", "reward_file"):
        return _is_never_copied
    of_suite = left_out_of_suite(task, present)
    return lambda path: _is_never_copied(path) or of_suite(path)


def _is_never_copied(path: str) -> bool:
    parts = path.split("/")
    return bool(NEVER_COPIED & set(parts)) or any(part.endswith(NEVER_COPIED_ENDINGS) for part in parts)
