"""Runs unittest modules and reports each result behind a nonce; a program of its own, standard library only.

Usage: python3 -I -B unittest_runner.py NONCE MODULE ...

The tested code shares this process, so it could forge a result on purpose. It gains nothing by an early exit, printed
success, modules that shadow unittest, or replaced assertions.
"""

import importlib
import os
import sys
import unittest


class Report(unittest.TestResult):
    """Remembers what passed."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, str]] = []

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        """Note a test that passed."""
        self.results.append(("PASSED", test.id()))

    def addFailure(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        """Note a failed assertion."""
        self.results.append(("FAILED", test.id()))

    def addError(self, test: unittest.TestCase, err: object) -> None:  # noqa: N802
        """Note an exception, also of a module that cannot be imported."""
        self.results.append(("ERROR", test.id()))


def fingerprint() -> list[object]:
    """What the tests rely on and code under test must leave alone."""
    watched = (unittest.TestCase, unittest.TestResult, unittest.TestSuite, unittest.TestLoader, Report)
    return [list(vars(cls).items()) for cls in watched] + [os.write, sys.exit, unittest.TestCase, importlib.__import__]


def main() -> None:
    """Run the modules named on the command line."""
    nonce, *modules = sys.argv[1:]
    sys.argv = [modules[0]]
    report_to = os.dup(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    write, before, report = os.write, fingerprint(), Report()
    sys.path.insert(0, os.getcwd())
    unittest.defaultTestLoader.loadTestsFromNames(modules).run(report)
    verdicts = report.results if fingerprint() == before else [("ERROR", "the code under test changed unittest")]
    write(report_to, "".join(f"{nonce} {verdict} {name}\n" for verdict, name in verdicts).encode())


if __name__ == "__main__":
    main()
