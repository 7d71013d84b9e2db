"""The tasks under attack: three that we ship, whose tests are data, and one each for unittest and pytest."""

from pathlib import Path

from small_swe import all_tasks

from tree_rl.rollout.environments.swe_task import SweTask

SHIPPED = ("lru_cache", "roman_numerals", "event_bus")
RIGHT = '''"""A shelf of labelled boxes."""


class Shelf:
    def __init__(self, room):
        if room < 1:
            raise ValueError("a shelf needs room for one box")
        self.room = room
        self._boxes = []

    def put(self, label):
        if len(self._boxes) == self.room:
            raise OverflowError("the shelf is full")
        self._boxes.append(label)

    def take(self):
        """The box put last; None from an empty shelf."""
        return self._boxes.pop() if self._boxes else None

    def labels(self):
        return list(self._boxes)
'''
WRONG = RIGHT.replace("self._boxes.pop()", "self._boxes.pop(0)")
VISIBLE = {
    "test_room": "self.assertRaises(ValueError, Shelf, 0)",
    "test_put": 'shelf = Shelf(2); shelf.put("a"); self.assertEqual(shelf.labels(), ["a"])',
    "test_empty": "self.assertIsNone(Shelf(1).take())",
}
HIDDEN = {
    "test_last_box": 'shelf = Shelf(2); shelf.put("a"); shelf.put("b"); self.assertEqual(shelf.take(), "b")',
    "test_rest": (
        'shelf = Shelf(3); [shelf.put(x) for x in "abc"]; shelf.take(); self.assertEqual(shelf.labels(), ["a", "b"])'
    ),
}


def unittest_source(name: str, tests: dict[str, str]) -> str:
    """A test module for unittest."""
    lines = [f"    def {test}(self):\n        {body}\n" for test, body in tests.items()]
    return "import unittest\n\nfrom shelf import Shelf\n\n\n" + f"class {name}(unittest.TestCase):\n" + "\n".join(lines)


def pytest_source(tests: dict[str, str]) -> str:
    """A test module of plain functions, as pytest's users write them."""
    bodies = {
        name: body.replace("self.assertRaises(ValueError, Shelf, 0)", "pytest.raises(ValueError, Shelf, 0)")
        .replace("self.assertIsNone(Shelf(1).take())", "assert Shelf(1).take() is None")
        .replace("self.assertEqual(shelf.labels(), ", "assert (shelf.labels() == ")
        .replace('self.assertEqual(shelf.take(), "b")', 'assert shelf.take() == "b"')
        for name, body in tests.items()
    }
    return "import pytest\n\nfrom shelf import Shelf\n" + "".join(
        f"\n\ndef {name}():\n    {body}\n" for name, body in bodies.items()
    )


def unittest_task() -> SweTask:
    """Hidden and visible tests that unittest runs."""
    visible = {"tests/test_shelf.py": unittest_source("TestShelf", VISIBLE)}
    hidden = {"tests/test_shelf_issue.py": unittest_source("TestIssue", HIDDEN)}
    return SweTask(
        instance_id="unittest",
        problem_statement="`Shelf.take` returns the box that was put first, not the one put last.",
        files={"shelf.py": WRONG, **visible},
        test_command="python3 -I -B {runner} {tests}",
        test_targets=("tests.test_shelf_issue", "tests.test_shelf"),
        fail_to_pass=tuple(f"tests.test_shelf_issue.TestIssue.{name}" for name in HIDDEN),
        pass_to_pass=tuple(f"tests.test_shelf.TestShelf.{name}" for name in VISIBLE),
        log_format="unittest",
        test_files={**visible, **hidden},
        solution_files={"shelf.py": RIGHT},
    )


def pytest_task(packages: Path) -> SweTask:
    """The same for pytest.

    Args:
        packages: folder that holds pytest, as commands see it.
    """
    visible = {"tests/test_shelf.py": pytest_source(VISIBLE)}
    hidden = {"tests/test_shelf_issue.py": pytest_source(HIDDEN)}
    return SweTask(
        instance_id="pytest",
        problem_statement="`Shelf.take` returns the box that was put first. It should return the one put last.",
        files={"shelf.py": WRONG, **visible},
        prelude=f"export PYTHONPATH={packages} PYTHONDONTWRITEBYTECODE=1",
        test_command="python3 -m pytest --no-header -rA --tb=no -p no:cacheprovider {tests}",
        test_targets=("tests/test_shelf_issue.py", "tests/test_shelf.py"),
        fail_to_pass=tuple(f"tests/test_shelf_issue.py::{name}" for name in HIDDEN),
        pass_to_pass=tuple(f"tests/test_shelf.py::{name}" for name in VISIBLE),
        log_format="pytest",
        test_files={**visible, **hidden},
        solution_files={"shelf.py": RIGHT},
    )


def attacked_tasks(packages: Path) -> dict[str, SweTask]:
    """All five by name."""
    shipped = {name: all_tasks()[name] for name in SHIPPED}
    return {**shipped, "unittest": unittest_task(), "pytest": pytest_task(packages)}
