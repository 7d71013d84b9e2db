"""Rows in the schema of SWE-bench and SWE-smith (written for this test) become tasks; the git work is really done."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from judged_tasks import score_task, with_pytest

from tree_rl.rollout.environments.published_tasks import from_swe_bench, from_swe_smith
from tree_rl.rollout.environments.swe_reports import TestReport, passed_tests, verdicts_of
from tree_rl.rollout.environments.swe_task import SweTask

ROWS = Path(__file__).parent / "published_rows"
SOUND = {
    "pkg/__init__.py": "",
    "pkg/sums.py": "def add(a, b):\n    return a + b\n",
    "tests/test_sums.py": "from pkg.sums import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
}
REPORT = """\
============ short test summary info ============
PASSED tests/test_sums.py::test_zero
XFAIL tests/test_sums.py::test_known - reason
FAILED tests/test_sums.py::test_add - assert -1 == 3
PASSED tests/test_sums.py::test_text[a b]
ERROR tests/test_other.py - ImportError
"""


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]


def test_reports_of_pytest_are_read() -> None:
    assert passed_tests(verdicts_of(REPORT, log_format="pytest")) == {
        "tests/test_sums.py::test_zero",
        "tests/test_sums.py::test_known",
        "tests/test_sums.py::test_text[a b]",
    }


def in_a_confined_copy(task: SweTask, command: str) -> TestReport:
    """The task with its repository written as files, and pytest of this installation."""
    git = "git -c user.name=a -c user.email=a@b"
    start = f"git init -q && git add pkg tests && {git} commit -qm Sound && git tag sound"
    here = replace(
        task,
        image=None,
        directory=None,
        prelude="export GIT_CONFIG_NOSYSTEM=1",
        files={**SOUND, **task.files},
        setup=f"{start} && {task.setup}" if task.setup else start,
        test_command=task.test_command.replace("python ", "python3 "),
    )
    return score_task(with_pytest(here), command)[1]


def test_the_bug_patch_of_swe_smith_is_applied_and_edited_tests_are_restored() -> None:
    row = rows("swe_smith")[0]
    task = from_swe_smith(row)
    sound_test = SOUND["tests/test_sums.py"] + "\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    task = replace(task, files={**task.files, "tests/test_sums.py": sound_test})
    before = in_a_confined_copy(task, "true")
    assert (before.fail_to_pass, before.pass_to_pass) == ((0, 1), (1, 1)), before
    cheat = in_a_confined_copy(task, "printf 'def test_add(): pass\\ndef test_zero(): pass\\n' > tests/test_sums.py")
    assert not cheat.is_solved
    assert in_a_confined_copy(task, "sed -i 's/a - b/a + b/' pkg/sums.py").is_solved


def test_the_test_patch_of_swe_bench_is_applied_only_at_scoring() -> None:
    task = from_swe_bench(rows("swe_bench")[0])
    task = replace(task, before_tests=task.before_tests.replace("0123456789abcdef0123456789abcdef01234567", "sound"))
    broken = "sed -i 's/a + b/a - b/' pkg/sums.py; ! grep -q test_add tests/test_sums.py || rm -rf pkg"
    before = in_a_confined_copy(task, broken)
    assert (before.fail_to_pass, before.pass_to_pass) == ((0, 1), (1, 1)), before
    assert in_a_confined_copy(task, "rm -rf tests").is_solved
