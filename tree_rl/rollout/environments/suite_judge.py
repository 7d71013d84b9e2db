"""Judges by a suite of unittest or pytest: published benchmarks, and your tasks in these formats.

Code under test shares a process with such tests, so we add canaries. We do not copy the agent's files that configure or
shadow the test framework; the task's files stay in their place.
"""

import base64
import posixpath
import re
import secrets
import shlex
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from tree_rl.rollout.environments.canaries.planting import Planted, plant
from tree_rl.rollout.environments.swe_reports import (
    REPORT_CHARACTERS,
    TestReport,
    passed_tests,
    published_name,
    report_of,
    verdicts_of,
)
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.sandbox import Sandbox
from tree_rl.rollout.sandbox.sandbox_folder import CommandResult

Run = Callable[[str], Awaitable[CommandResult]]
"""Executes a command in the repository."""
UNITTEST_RUNNER = "unittest_runner.py"
MAX_TEST_FILE_BYTES = 1 << 20
"""Size from which a test file in the image gets no canaries. Judges keep more output than that in base64."""
ADDED_TO_PYTEST = "export PYTEST_ADDOPTS='--maxfail=0'; "
"""Option for pytest, because a configuration that stops at the first failure would stop at a canary."""
CONFIGURING = {
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "noxfile.py", ".coveragerc", "sitecustomize.py", "usercustomize.py"),
}
SHADOWED = sys.stdlib_module_names - {"test"} | {
    *("_pytest", "pytest", "pluggy", "iniconfig", "py", "exceptiongroup", "tomli", "packaging", "pygments", "xdist")
}
"""Modules that an interpreter or a test framework imports, which a file of the agent could shadow."""
TEST_FOLDERS = ("test", "tests", "testing")
"""Names of folders that hold tests and their helpers."""
EXPECTS_FAILURE = re.compile("xfail|expectedFailure")
IMPORTABLE = (".py", ".so", ".pyd")


async def run_suite(task: SweTask, sandbox: Sandbox, run: Run) -> TestReport:
    """Run a task's tests with canaries among them."""
    sources = await _test_sources(task, run)
    planted = plant(
        sources,
        targets=task.test_targets,
        counting=(*task.fail_to_pass, *task.pass_to_pass),
        is_pytest=task.log_format == "pytest",
    )
    await sandbox.write(planted.files)
    runner = f".{secrets.token_hex(8)}.py"
    if task.log_format == "unittest":
        await sandbox.write({runner: Path(__file__).with_name(UNITTEST_RUNNER).read_text(encoding="utf-8")})
    command = task.test_command.replace("{tests}", shlex.join(planted.targets)).replace("{runner}", runner)
    result = await run((ADDED_TO_PYTEST if task.log_format == "pytest" else "") + command)
    if result.truncated:
        return report_of(task, (), f"the report was cut after {len(result.output)} characters, before its verdicts")
    return _decide(task, sources, planted, result.output)


def _decide(task: SweTask, sources: Mapping[str, str], planted: Planted, output: str) -> TestReport:
    verdicts = verdicts_of(output, log_format=task.log_format)
    doubt = planted.doubt(verdicts)
    if task.log_format == "unittest" and verdicts:
        output = "".join(f"{' '.join(sorted(said))} {name}\n" for name, said in sorted(verdicts.items()))
    shown = output[-REPORT_CHARACTERS:]
    if doubt:
        return report_of(task, (), f"{doubt}\n{shown}")
    return report_of(task, passed_tests(verdicts) - _failures_of_the_code(task, sources, verdicts), shown)


def _failures_of_the_code(task: SweTask, sources: Mapping[str, str], verdicts: Mapping[str, set[str]]) -> set[str]:
    """Tests to repair that failed as expected though their file expects no failure: the code called `pytest.xfail`."""
    found = {
        name
        for name, said in verdicts.items()
        if "XFAIL" in said and not EXPECTS_FAILURE.search(sources.get(name.partition("::")[0], "xfail"))
    }
    return {*found, *map(published_name, found)} & set(task.fail_to_pass)


async def _test_sources(task: SweTask, run: Run) -> Mapping[str, str]:
    """Texts, by path, of the readable test files that the command names completely."""
    sources = {}
    for path in dict.fromkeys(path for path in map(partial(test_path, task.log_format), task.test_targets) if path):
        text = None if task.test_patch else task.test_files.get(path)
        text = await _read(run, path) if text is None else text
        if text is not None:
            sources[path] = text
    return sources


def test_path(log_format: str, target: str) -> str | None:
    """The file that a target names completely; None for a folder or a part of a file."""
    path = target.replace(".", "/") + ".py" if log_format == "unittest" else posixpath.normpath(target)
    return path if path.endswith(".py") and not path.startswith(("/", "../")) else None


async def _read(run: Run, path: str) -> str | None:
    """Read a text file of the sandbox; None if it is missing, large or no text."""
    done = await run(f"head -c {MAX_TEST_FILE_BYTES} {shlex.quote(path)} | base64")
    try:
        content = base64.b64decode("".join(done.output.split()), validate=True)
        return content.decode() if 0 < len(content) < MAX_TEST_FILE_BYTES and not done.truncated else None
    except ValueError:
        return None


def left_out_of_suite(task: SweTask, present: Collection[str]) -> Callable[[str], bool]:
    """A function that returns True for files of the agent that would configure or shadow the test framework or tests,
    and for all that it changed in the folders of tests, such as the helpers that tests import.

    Args:
        present: paths in the task's repository, besides those of `task.files`: those at its top and in
            `folders_above_tests`.
    """
    tests = _own_tests(task)
    above_tests = folders_above_tests(task)
    own = {*present, *task.files, *(folder for path in task.files for folder in _folders_of(path))}
    # Test frameworks add no folder of a package to Python's path, so names in it shadow nothing.
    packages = {folder for folder in above_tests if f"{folder}/__init__.py" in own}
    roots = {"", *(posixpath.dirname(path) for path in tests), *(above_tests - packages)}
    modules = {path.partition(".")[0] for path in tests} | above_tests
    of_tests = tuple(f"{folder}/" for folder in above_tests if posixpath.basename(folder) in TEST_FOLDERS)

    def leave_out(path: str) -> bool:
        *folders, name = path.split("/")
        if CONFIGURING & {*folders, name} or path in tests or path.startswith(of_tests):
            return True
        for depth, part in enumerate(path.split("/")):
            above = "/".join(folders[:depth])
            module = posixpath.join(above, part.partition(".")[0])
            is_folder = depth < len(folders)
            if module in modules and module not in above_tests and is_folder:
                # A folder would shadow a module of tests: tests/test_a/ next to tests/test_a.py.
                return True
            if module in modules and not is_folder and name.endswith(IMPORTABLE) and path not in own:
                return True
            if above in roots and posixpath.join(above, part) not in own and part.partition(".")[0] in SHADOWED:
                return True
        return False

    return leave_out


def folders_above_tests(task: SweTask) -> set[str]:
    """The folders on the way to a task's tests, without the top."""
    return {folder for path in _own_tests(task) for folder in _folders_of(path)}


def _own_tests(task: SweTask) -> set[str]:
    named = {
        path for path in (test_path(task.log_format, target.partition("::")[0]) for target in task.test_targets) if path
    }
    return {*task.test_files, *re.findall(r"^diff --git a/.* b/(.*)$", task.test_patch, re.MULTILINE), *named}


def _folders_of(path: str) -> list[str]:
    return [str(folder) for folder in PurePosixPath(path).parents if str(folder) != "."]
