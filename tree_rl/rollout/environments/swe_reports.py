"""Reads the verdicts of tests from the output of a test run."""

import base64
import json
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tree_rl.rollout.environments.swe_task import LogFormat, SweTask

PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\s+(\S[^\[]*?(?:\[.*?(?:\]|$))?)(?: - .*)?$")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
UNITTEST_MARK = "unittest-report "
"""Start of the one line that `unittest_runner` prints."""
REPORT_CHARACTERS = 4000
"""Number of characters from the output's end that a report keeps."""
MAX_REPORT_BYTES = 32 << 20
"""Largest decompressed report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestReport:
    """Result of a task's tests."""

    __test__ = False

    fail_to_pass: tuple[int, int]
    """Number of passed tests among those that must be repaired, and number of these tests."""
    pass_to_pass: tuple[int, int]
    """Number of unchanged verdicts among tests that must keep theirs, and number of these tests."""
    output: str

    @property
    def is_solved(self) -> bool:
        return all(passed == total for passed, total in (self.fail_to_pass, self.pass_to_pass))


def verdicts_of(output: str, *, log_format: LogFormat) -> dict[str, set[str]]:
    """All verdicts on each test, by its name: PASSED, FAILED, ERROR, XFAIL, XPASS, SKIPPED.

    Empty for a run of unittest that printed no report or several.
    """
    verdicts: dict[str, set[str]] = {}
    for verdict, name in _from_unittest(output) if log_format == "unittest" else _from_pytest(output):
        verdicts.setdefault(name, set()).add(verdict)
    return verdicts


def _from_pytest(output: str) -> list[tuple[str, str]]:
    matches = (PYTEST_LINE.match(COLOUR.sub("", line).strip()) for line in output.splitlines())
    return [(match[1], match[2]) for match in matches if match]


def _from_unittest(output: str) -> list[tuple[str, str]]:
    lines = [line for line in output.split("\n") if line.startswith(UNITTEST_MARK)]
    if len(lines) != 1:
        return []
    try:
        packed = base64.b64decode(lines[0].removeprefix(UNITTEST_MARK), validate=True)
        report = json.loads(zlib.decompressobj().decompress(packed, MAX_REPORT_BYTES))
        return [(str(verdict), str(name)) for verdict, name in report]
    except (ValueError, TypeError, RecursionError, zlib.error):
        return []


def report_of(task: SweTask, passed: Collection[str], output: str) -> TestReport:
    """A report that compares the tests that passed with those that must."""
    return TestReport(
        fail_to_pass=(sum(name in passed for name in task.fail_to_pass), len(task.fail_to_pass)),
        pass_to_pass=(
            sum(name in passed for name in task.pass_to_pass) + sum(name not in passed for name in task.must_fail),
            len(task.pass_to_pass) + len(task.must_fail),
        ),
        output=output,
    )


def passed_tests(verdicts: Mapping[str, set[str]]) -> set[str]:
    """Names of the tests whose only verdict is that they passed, or failed as expected (pytest).

    Parametrized tests also count by their published name.
    """
    by_name = {name: set(said) for name, said in verdicts.items()}
    for name, said in verdicts.items():
        published = published_name(name)
        if "[" in published and published not in verdicts:
            by_name.setdefault(published, set()).update(said)
    return {name for name, said in by_name.items() if said in ({"PASSED"}, {"XFAIL"})}


def published_name(name: str) -> str:
    """A test's name as SWE-bench publishes it: up to the first space."""
    return name.partition(" ")[0]


def is_full_reward(text: str) -> bool:
    """True if a reward file has a number of at least 1, or JSON `{"reward": number}` with one."""
    try:
        said = json.loads(text)
        reward = said["reward"] if isinstance(said, dict) else said
    except (ValueError, KeyError, RecursionError):
        return False
    return type(reward) in (int, float) and 1.0 <= reward < float("inf")
