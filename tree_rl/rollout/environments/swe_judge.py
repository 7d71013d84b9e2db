"""Judges a software task in a sandbox of its own: the task laid out anew, a copy of the agent's files, its tests.

Nothing there was written by a live process of the agent. Files of the agent that configure or shadow the test
framework are not taken over; the task's own stand in their place.
"""

import base64
import posixpath
import re
import secrets
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from pathlib import Path, PurePosixPath

from tree_rl.rollout.environments.canaries.planting import Planted, plant
from tree_rl.rollout.environments.cases import RUNNER_NAME as CASE_RUNNER
from tree_rl.rollout.environments.cases import passed_cases, programs_for_child
from tree_rl.rollout.environments.swe_reports import TestReport, is_full_reward, judge, passed_tests, verdicts_of
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.sandbox import Sandbox, SandboxDied, SandboxError, quote
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult

UNITTEST_RUNNER = "unittest_runner.py"
REPORT_CHARACTERS = 4000
READ_BYTES = 24_000
"""Of a test file in the image, read by one command: its base64 fits the smallest sensible output limit."""
MAX_TEST_FILE_BYTES = 1 << 20
ADDED_TO_PYTEST = "export PYTEST_ADDOPTS='--maxfail=0'; "
"""A configuration that stops at the first failure would stop at a canary."""
CONFIGURING = {
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "noxfile.py", ".coveragerc", "sitecustomize.py", "usercustomize.py"),
}
NEVER_COPIED = {".git", "__pycache__"}
NEVER_COPIED_ENDINGS = (".pyc", ".pth", ".egg-info", ".dist-info", ".egg")
SHADOWED = sys.stdlib_module_names - {"test"} | {
    *("_pytest", "pytest", "pluggy", "iniconfig", "py", "exceptiongroup", "tomli", "packaging", "pygments", "xdist")
}
"""Modules that an interpreter or a test framework imports, where a file of the agent could come first."""
IMPORTABLE = (".py", ".so", ".pyd")


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
    planted = plant(
        await _test_sources(task, sandbox),
        targets=task.test_targets,
        counting=(*task.fail_to_pass, *task.pass_to_pass),
        is_pytest=task.log_format == "pytest",
    )
    await sandbox.write(planted.files)
    runner = f".{secrets.token_hex(8)}.py"
    if task.log_format == "unittest":
        await sandbox.write({runner: _program(UNITTEST_RUNNER)})
    command = task.test_command.replace("{tests}", quote(planted.targets)).replace("{runner}", runner)
    result = await in_repository(task, sandbox, (ADDED_TO_PYTEST if task.log_format == "pytest" else "") + command)
    return _decide(task, planted, result.output)


async def _run_cases(task: SweTask, sandbox: Sandbox) -> TestReport:
    runner, programs_file = (f".{secrets.token_hex(8)}{suffix}" for suffix in (".py", ".json"))
    programs, key = programs_for_child(task.cases)
    await sandbox.write({runner: _program(CASE_RUNNER), programs_file: programs})
    result = await in_repository(task, sandbox, f"python3 -I -B {runner} {programs_file}")
    return judge(task, passed_cases(task.cases, key, result.output), result.output[-REPORT_CHARACTERS:])


async def _run_verifier(task: SweTask, sandbox: Sandbox) -> TestReport:
    """Run the task's own verifier and read its reward. What the image or the agent left in the files' place goes."""
    await in_repository(task, sandbox, f"rm -rf {quote(task.reward_files)}")
    result = await in_repository(task, sandbox, task.test_command)
    said = [(await in_repository(task, sandbox, f"head -c 1000 {quote([path])}")) for path in task.reward_files]
    is_full = not result.timed_out and any(one.exit_code == 0 and is_full_reward(one.output) for one in said)
    return judge(task, task.fail_to_pass if is_full else (), result.output[-REPORT_CHARACTERS:])


def _decide(task: SweTask, planted: Planted, output: str) -> TestReport:
    verdicts = verdicts_of(output, log_format=task.log_format)
    doubt = planted.doubt(verdicts)
    if task.log_format == "unittest" and verdicts:
        output = "".join(f"{' '.join(sorted(said))} {name}\n" for name, said in sorted(verdicts.items()))
    shown = output[-REPORT_CHARACTERS:]
    if doubt:
        return judge(task, (), f"{doubt}\n{shown}")
    return judge(task, passed_tests(verdicts), shown)


async def _test_sources(task: SweTask, sandbox: Sandbox) -> Mapping[str, str]:
    """Path -> text of the files of tests that the command names whole, as far as they can be read."""
    sources = {}
    for path in dict.fromkeys(path for path in map(partial(test_path, task.log_format), task.test_targets) if path):
        text = None if task.test_patch else task.test_files.get(path)
        text = await _read(task, sandbox, path) if text is None else text
        if text is not None:
            sources[path] = text
    return sources


def test_path(log_format: str, target: str) -> str | None:
    """The file that a target names whole; None for a folder or a part of a file."""
    path = target.replace(".", "/") + ".py" if log_format == "unittest" else posixpath.normpath(target)
    return path if path.endswith(".py") and not path.startswith(("/", "../")) else None


async def _read(task: SweTask, sandbox: Sandbox, path: str) -> str | None:
    """A text file of the sandbox; None if there is none, or a large one."""
    content = b""
    while len(content) < MAX_TEST_FILE_BYTES:
        command = f"tail -c +{len(content) + 1} {quote([path])} | head -c {READ_BYTES} | base64"
        done = await in_repository(task, sandbox, command)
        try:
            read = base64.b64decode("".join(done.output.split()), validate=True)
        except ValueError:
            return None
        content += read
        if len(read) < READ_BYTES:
            break
    try:
        return content.decode() if 0 < len(content) < MAX_TEST_FILE_BYTES else None
    except UnicodeDecodeError:
        return None


def left_out(task: SweTask, present: Collection[str] = ()) -> Callable[[str], bool]:
    """Which of the agent's files are not taken over: what a version control or Python keeps for itself, and for
    unittest and pytest what configures or shadows the test framework and the tests.

    Args:
        present: names at the top of the repository as the task has it; `task.files` know theirs.
    """
    if task.log_format in ("cases", "reward_file"):
        return _is_never_copied
    tests = _own_tests(task)
    roots = {"", *(folder for path in tests for folder in _folders_of(path))}
    modules = {path.partition(".")[0] for path in tests} | roots - {""}
    own = set(present) | {path.partition("/")[0] for path in task.files}

    def leave_out(path: str) -> bool:
        *folders, name = path.split("/")
        if _is_never_copied(path) or CONFIGURING & {*folders, name} or path in tests:
            return True
        for depth, part in enumerate(path.split("/")):
            above = "/".join(folders[:depth])
            module = posixpath.join(above, part.partition(".")[0])
            is_folder = depth < len(folders)
            if module in modules and module not in roots and is_folder:
                # A folder takes the place of a module of tests: tests/test_a/ beside tests/test_a.py.
                return True
            if module in modules and not is_folder and name.endswith(IMPORTABLE) and path not in task.files:
                return True
            is_own = part in own if not above else path in task.files
            if above in roots and not is_own and part.partition(".")[0] in SHADOWED:
                return True
        return False

    return leave_out


def _is_never_copied(path: str) -> bool:
    parts = path.split("/")
    return bool(NEVER_COPIED & set(parts)) or any(part.endswith(NEVER_COPIED_ENDINGS) for part in parts)


def _own_tests(task: SweTask) -> set[str]:
    """Paths of the files that the task brings or names as tests."""
    named = {
        path for path in (test_path(task.log_format, target.partition("::")[0]) for target in task.test_targets) if path
    }
    return {*task.test_files, *re.findall(r"^diff --git a/.* b/(.*)$", task.test_patch, re.MULTILINE), *named}


def _folders_of(path: str) -> list[str]:
    return [str(folder) for folder in PurePosixPath(path).parents if str(folder) != "."]


@cache
def _program(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
