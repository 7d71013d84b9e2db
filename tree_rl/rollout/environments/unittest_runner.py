"""Runs unittest modules and prints all verdicts in one line.

Usage: python3 -I -B unittest_runner.py TARGET ... (standard library only)

The tested code shares this process and could forge the report. So some tests must fail (`canaries`), and only the
reader of the report knows their names.
"""

import base64
import importlib.util
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


def tests_of(target: str, loader: unittest.TestLoader) -> unittest.TestSuite:
    """The tests of a module, or of a class or method in it."""
    parts = target.split(".")
    number = len(parts)
    while number > 1 and not os.path.exists(place_of(parts[:number])):
        number -= 1
    module = module_at(parts[:number])
    rest = ".".join(parts[number:])
    return loader.loadTestsFromName(rest, module) if rest else loader.loadTestsFromModule(module)


def place_of(parts: list[str]) -> str:
    """The file of a module in the repository; a file takes precedence over a folder."""
    path = os.path.join(os.getcwd(), *parts)
    return path + ".py" if os.path.isfile(path + ".py") else os.path.join(path, "__init__.py")


def module_at(parts: list[str]) -> ModuleType:
    """Import a module of tests by its path, so that nothing shadows it."""
    for number in range(1, len(parts) + 1):
        name = ".".join(parts[:number])
        if name in sys.modules:
            continue
        folder = os.path.join(os.getcwd(), *parts[:number])
        if number < len(parts) and not os.path.isfile(os.path.join(folder, "__init__.py")):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [folder]
        else:
            load(name, os.path.join(folder, "__init__.py") if number < len(parts) else place_of(parts))
        if number > 1:
            setattr(sys.modules[".".join(parts[: number - 1])], parts[number - 1], sys.modules[name])
    return sys.modules[".".join(parts)]


def load(name: str, path: str) -> None:
    """Execute a file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    try:
        spec.loader.exec_module(sys.modules[name])  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise


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
            tests.addTests(tests_of(target, loader))
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
