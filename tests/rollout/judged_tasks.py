"""One small repository as a task of unittest and as a task of pytest, and how to score what an agent did to it."""

import importlib.util
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from sandboxes_here import HERE
from small_swe import score_after

from tree_rl.rollout.environments.swe_reports import TestReport
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.processes.bubblewrap import SEARCH_PATH

BUGGY = '''\
"""Durations as people write them."""

UNITS = {"s": 1, "m": 60, "h": 360}


class Duration:
    """A number of seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __eq__(self, other):
        return isinstance(other, Duration) and other.seconds == self.seconds

    def __hash__(self):
        return hash(self.seconds)


def parse(text):
    """Read such as 1h30m; raises ValueError for an unknown unit."""
    total, number = 0, ""
    for sign in text:
        if sign.isdigit():
            number += sign
        elif sign in UNITS and number:
            total += int(number) * UNITS[sign]
            number = ""
        else:
            raise ValueError(text)
    return Duration(total)


def parts(seconds):
    """Hours, minutes and seconds."""
    return [seconds // 3600, seconds // 60 % 60, seconds % 60]
'''
SOUND = BUGGY.replace("360}", "3600}")
VISIBLE = """\
import unittest

from durations import Duration, parse, parts


class TestDurations(unittest.TestCase):
    def test_seconds_and_minutes(self):
        self.assertEqual(parse("10s"), Duration(10))
        self.assertEqual(parse("2m10s").seconds, 130)

    def test_unknown_units_are_refused(self):
        with self.assertRaises(ValueError):
            parse("3x")

    def test_parts_of_a_long_time(self):
        for seconds, expected in ((3661, [1, 1, 1]), (59, [0, 0, 59])):
            with self.subTest(seconds=seconds):
                self.assertEqual(parts(seconds), expected)


if __name__ == "__main__":
    unittest.main()
"""
VISIBLE_NAMES = ("test_seconds_and_minutes", "test_unknown_units_are_refused")
HIDDEN_NAMES = ("test_an_hour_has_its_seconds", "test_a_day_of_hours")
HIDDEN = """\
import unittest

from durations import Duration, parse


class TestIssue(unittest.TestCase):
    def setUp(self):
        self.day = parse("24h")

    def test_an_hour_has_its_seconds(self):
        self.assertEqual(parse("1h").seconds, 3600)

    def test_a_day_of_hours(self):
        self.assertEqual(self.day, Duration(86400))
"""
UNITTEST = SweTask(
    instance_id="durations",
    problem_statement="1h is too short.",
    files={"durations.py": BUGGY, "tests/test_durations.py": VISIBLE},
    test_command="python3 -I -B {runner} {tests}",
    test_targets=("tests.test_durations", "tests.test_durations_issue"),
    fail_to_pass=tuple(f"tests.test_durations_issue.TestIssue.{name}" for name in HIDDEN_NAMES),
    pass_to_pass=tuple(
        f"tests.test_durations.TestDurations.{name}" for name in (*VISIBLE_NAMES, "test_parts_of_a_long_time")
    ),
    log_format="unittest",
    before_tests="rm -rf tests",
    test_files={"tests/test_durations.py": VISIBLE, "tests/test_durations_issue.py": HIDDEN},
    solution_files={"durations.py": SOUND},
)
VISIBLE_PYTEST = """\
import pytest

from durations import Duration, parse, parts


def test_seconds_and_minutes(ten):
    assert parse("10s") == ten
    assert parse("2m10s").seconds == 130


def test_unknown_units_are_refused():
    with pytest.raises(ValueError):
        parse("3x")


class TestParts:
    @pytest.mark.parametrize("seconds, expected", [(3661, [1, 1, 1]), (59, [0, 0, 59])])
    def test_of_a_time(self, seconds, expected):
        assert parts(seconds) == expected
"""
HIDDEN_PYTEST = """\
from durations import Duration, parse


def test_an_hour_has_its_seconds():
    assert parse("1h").seconds == 3600


def test_a_day_of_hours():
    day = parse("24h")
    assert day == Duration(86400)
"""
PYTEST_PARTS = ("3661-expected0", "59-expected1")
CONFTEST = "import pytest\n\nfrom durations import Duration\n\n\n@pytest.fixture\ndef ten():\n    return Duration(10)\n"
PYTEST_FILES = {"tests/conftest.py": CONFTEST, "tests/test_durations.py": VISIBLE_PYTEST}
PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


@cache
def pytest_folder() -> str:
    """A folder with a copy of pytest, which users of sandboxes can read."""
    folder = Path(tempfile.mkdtemp(prefix="pytest-copy-"))
    folder.chmod(0o755)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        if not spec.submodule_search_locations:
            shutil.copy(spec.origin, folder)
            continue
        shutil.copytree(spec.submodule_search_locations[0], folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    python = shutil.which("python3", path=SEARCH_PATH)
    assert python is not None
    # Sandboxes start it hundreds of times, and may not write there.
    subprocess.run([python, "-I", "-m", "compileall", "-q", folder], check=True)
    return str(folder)


def with_pytest(task: SweTask) -> SweTask:
    """The task in a sandbox whose Python finds pytest; its installation is read-only there."""
    return replace(task, prelude=f"export PYTHONPATH={pytest_folder()} PYTHONDONTWRITEBYTECODE=1\n{task.prelude}")


def pytest_task() -> SweTask:
    """The repository with tests of pytest, a conftest and a configuration that stops at the first failure."""
    visible, hidden = "tests/test_durations.py", "tests/test_durations_issue.py"
    names = (*VISIBLE_NAMES, *(f"TestParts::test_of_a_time[{one}]" for one in PYTEST_PARTS))
    task = replace(
        UNITTEST,
        files={"durations.py": BUGGY, "pytest.ini": "[pytest]\naddopts = -x\n", **PYTEST_FILES},
        test_files={**PYTEST_FILES, hidden: HIDDEN_PYTEST},
        test_command="python3 -m pytest --no-header -rA --tb=no -p no:cacheprovider {tests}",
        test_targets=(visible, hidden),
        fail_to_pass=tuple(f"{hidden}::{name}" for name in HIDDEN_NAMES),
        pass_to_pass=tuple(f"{visible}::{name}" for name in names),
        log_format="pytest",
    )
    return with_pytest(task)


def score_task(task: SweTask, command: str) -> tuple[float, TestReport]:
    """Reward and report after one command of an agent."""
    readable = (pytest_folder(),) if task.log_format == "pytest" else ()
    return score_after(task, command, options=replace(HERE, readable=readable))
