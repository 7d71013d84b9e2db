"""Reads from the output of a test run which tests passed."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from tree_rl.rollout.environments.swe_task import LogFormat, SweTask

PYTEST_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\s+(\S.*?)(?: - .*)?$")
PYTEST_PASSES = ("PASSED", "XFAIL")


@dataclass(frozen=True, kw_only=True, slots=True)
class TestReport:
    """How a task's tests ended."""

    __test__ = False

    fail_to_pass: tuple[int, int]
    """How many tests that must be repaired passed, and how many there are."""
    pass_to_pass: tuple[int, int]
    """How many tests that must keep passing passed, and how many there are."""
    output: str
    """What the run printed, cut."""

    @property
    def is_solved(self) -> bool:
        """Whether every test that counts passed."""
        return all(passed == total for passed, total in (self.fail_to_pass, self.pass_to_pass))


def passed_tests(output: str, *, log_format: LogFormat, nonce: str) -> set[str]:
    """Names of the tests that passed. In the format `signed`, `nonce` stands before every line that counts."""
    if log_format == "signed":
        mark = f"{nonce} PASSED "
        return {line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark)}
    results: dict[str, str] = {}
    for line in output.splitlines():
        match = PYTEST_LINE.match(line.strip())
        if match:
            results[match[2]] = match[1]
    return {name for name, verdict in results.items() if verdict in PYTEST_PASSES}


def judge(task: SweTask, passed: Collection[str], output: str) -> TestReport:
    """Compare the tests that passed with those that must."""
    return TestReport(
        fail_to_pass=(sum(name in passed for name in task.fail_to_pass), len(task.fail_to_pass)),
        pass_to_pass=(sum(name in passed for name in task.pass_to_pass), len(task.pass_to_pass)),
        output=output,
    )
