"""Reads from the output of a test run how its tests ended."""

import base64
import json
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tree_rl.rollout.environments.swe_task import LogFormat, SweTask

PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\s+(\S.*?)(?: - .*)?$")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
UNITTEST_MARK = "unittest-report "
"""Text in front of the one line that `unittest_runner` prints."""
REPORT_CHARACTERS = 4000
"""Most characters of the output that a report keeps."""
MAX_REPORT_BYTES = 32 << 20
"""Unpacked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestReport:
    """How a task's tests ended."""

    __test__ = False

    fail_to_pass: tuple[int, int]
    """How many tests that must be repaired passed, and how many there are."""
    pass_to_pass: tuple[int, int]
    """How many tests that must keep their verdict kept it, and how many there are."""
    output: str
    """What the run printed, cut."""

    @property
    def is_solved(self) -> bool:
        """Whether every test that counts passed."""
        return all(passed == total for passed, total in (self.fail_to_pass, self.pass_to_pass))


def verdicts_of(output: str, *, log_format: LogFormat) -> dict[str, set[str]]:
    """Everything that was said of each test, by its name: PASSED, FAILED, ERROR, XFAIL, XPASS, SKIPPED.

    unittest's report is whole or empty: nothing is read from a run that printed none, or two.
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


def judge(task: SweTask, passed: Collection[str], output: str) -> TestReport:
    """Compare the tests that passed with those that must."""
    return TestReport(
        fail_to_pass=(sum(name in passed for name in task.fail_to_pass), len(task.fail_to_pass)),
        pass_to_pass=(
            sum(name in passed for name in task.pass_to_pass) + sum(name not in passed for name in task.must_fail),
            len(task.pass_to_pass) + len(task.must_fail),
        ),
        output=output,
    )


def passed_tests(verdicts: Mapping[str, set[str]]) -> set[str]:
    """Names of the tests of which one thing alone was said: that they passed, or failed as expected (pytest)."""
    return {name for name, said in verdicts.items() if said in ({"PASSED"}, {"XFAIL"})}


def is_full_reward(text: str) -> bool:
    """Whether a reward file says 1 or more: a number, or JSON `{"reward": number}`; anything else is no reward."""
    try:
        said = json.loads(text)
        reward = said["reward"] if isinstance(said, dict) else said
    except (ValueError, KeyError, RecursionError):
        return False
    return type(reward) in (int, float) and 1.0 <= reward < float("inf")
