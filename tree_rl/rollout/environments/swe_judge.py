"""Judges a software task in a sandbox of its own: the task laid out anew, a copy of the agent's files, its tests.

Nothing there was written by a live process of the agent.
"""

import secrets
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from tree_rl.rollout.environments.cases import RUNNER_NAME as CASE_RUNNER
from tree_rl.rollout.environments.cases import passed_cases, programs_for_child
from tree_rl.rollout.environments.suite_judge import left_out_of_suite, run_suite
from tree_rl.rollout.environments.swe_reports import REPORT_CHARACTERS, TestReport, is_full_reward, judge
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxDied, SandboxError, quote
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult

NEVER_COPIED = {".git", "__pycache__"}
NEVER_COPIED_ENDINGS = (".pyc", ".pth", ".egg-info", ".dist-info", ".egg")


async def judge_session(task: SweTask, agents: Sandbox, judges: Sandbox) -> TestReport:
    """Run the task's tests on a copy of the agent's files.

    What the agent caused (files that cannot be copied, tests that cannot be written, a time-out) is a report without
    passed tests.

    Args:
        agents: stopped; its files are read.
        judges: of `agents.fresh()`, not started; closed at the end.

    Raises:
        SandboxError: the judge's own sandbox fails before anything of the agent is in it.
        SandboxDied: it fails later.
    """
    try:
        leave_out = await _start(task, judges)
        try:
            await agents.copy_to(judges, leave_out=leave_out)
        except ValueError as error:
            return judge(task, (), f"the agent's files could not be copied: {error}")
        try:
            return await _run_tests(task, judges)
        except ValueError as error:
            return judge(task, (), f"the tests could not be written: {error}")
    finally:
        await judges.close()


async def _start(task: SweTask, judges: Sandbox) -> Callable[[str], bool]:
    """Start the judge's sandbox and lay out the task; returns which of the agent's files stay behind."""
    leave_out = left_out(task)
    try:
        await judges.start()
        # Without a setup the rest are the agent's, which may have deleted some.
        await lay_out(task, judges, None if task.setup else leave_out)
        if task.image is None:
            return leave_out
        return left_out(task, (await judges.run("ls -A")).output.splitlines())
    except SandboxDied as error:
        raise SandboxError(f"the judge's sandbox died before the agent's files came: {error}") from error


async def lay_out(task: SweTask, sandbox: Sandbox, wanted: Callable[[str], bool] | None = None) -> None:
    """Write the repository and set it up.

    Args:
        wanted: which files; None takes all.

    Raises:
        SandboxError: the task's setup fails.
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
    return judge(task, passed_cases(task.cases, key, result.output), result.output[-REPORT_CHARACTERS:])


async def _run_verifier(task: SweTask, sandbox: Sandbox) -> TestReport:
    """Run the task's own verifier and read its reward. What the image or the agent left in the files' place goes."""
    await in_repository(task, sandbox, f"rm -rf {quote(task.reward_files)}")
    result = await in_repository(task, sandbox, task.test_command)
    said = [(await in_repository(task, sandbox, f"head -c 1000 {quote([path])}")) for path in task.reward_files]
    is_full = not result.timed_out and any(one.exit_code == 0 and is_full_reward(one.output) for one in said)
    return judge(task, task.fail_to_pass if is_full else (), result.output[-REPORT_CHARACTERS:])


def left_out(task: SweTask, present: Collection[str] = ()) -> Callable[[str], bool]:
    """Which of the agent's files are not taken over: what a version control or Python keeps for itself, and what a
    suite of tests leaves out.

    Args:
        present: names at the top of the repository as the task has it; `task.files` know theirs.
    """
    if task.log_format in ("cases", "reward_file"):
        return _is_never_copied
    of_suite = left_out_of_suite(task, present)
    return lambda path: _is_never_copied(path) or of_suite(path)


def _is_never_copied(path: str) -> bool:
    parts = path.split("/")
    return bool(NEVER_COPIED & set(parts)) or any(part.endswith(NEVER_COPIED_ENDINGS) for part in parts)
