"""Runs unittest modules and prints all verdicts in one line.

Usage: python3 -I -B unittest_runner.py TARGET ... (standard library only)

The tested code shares this process and could forge the report. So some tests must fail (`canaries`), and only the
reader of the report knows their names.
"""

import base64
import importlib
import json
import os
import sys
import unittest
import zlib
from types import ModuleType


class Report(unittest.TestResult):
    """Records every verdict."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[tuple[str, str]] = []

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.verdicts.append(("PASSED", test.id()))

    def addFailure(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        self.verdicts.append(("FAILED", test.id()))

    def addError(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        """Record an exception, also of a module that cannot be imported."""
        self.verdicts.append(("ERROR", test.id()))

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: object) -> None:  # noqa: N802
        if err is not None:
            self.verdicts.append(("FAILED", test.id()))

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.verdicts.append(("SKIPPED", test.id()))

    def addExpectedFailure(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        """Record an expected failure, which does not count as passed."""
        self.verdicts.append(("EXPECTED", test.id()))

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.verdicts.append(("XPASS", test.id()))


def make_packages(target: str) -> None:
    """Make packages of the folders above a target that are none, or an installed package of their name would win."""
    parts = target.split(".")
    for number in range(1, len(parts)):
        name, folder = ".".join(parts[:number]), os.path.join(os.getcwd(), *parts[:number])
        if name in sys.modules or not os.path.isdir(folder) or os.path.isfile(os.path.join(folder, "__init__.py")):
            continue
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [folder]
        if number > 1:
            setattr(importlib.import_module(".".join(parts[: number - 1])), parts[number - 1], sys.modules[name])


def main() -> None:
    """Run the tests named on the command line."""
    targets = sys.argv[1:]
    sys.argv = [targets[0]]
    report_to = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.path.insert(0, os.getcwd())
    report, loader, tests = Report(), unittest.TestLoader(), unittest.TestSuite()
    for target in targets:
        try:
            make_packages(target)
            tests.addTests(loader.loadTestsFromName(target))
        # The code under test may raise any exception. These tests are then missing from the report.
        except Exception as error:  # noqa: BLE001
            os.write(report_to, f"{target}: {error!r}\n".encode("utf-8", "replace"))
    tests.run(report)
    packed = base64.b64encode(zlib.compress(json.dumps(report.verdicts).encode()))
    os.write(report_to, b"unittest-report " + packed + b"\n")
    # Do not wait for threads of the code under test.
    os._exit(0)


if __name__ == "__main__":
    main()
