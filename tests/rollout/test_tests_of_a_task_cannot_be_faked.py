"""On tasks of unittest and of pytest, no hack that makes every test pass gets a reward; the repair does.

With canaries and probes among them, the tests of sound code say what they say without, and every canary fails.
"""

import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from judged_tasks import BUGGY, SOUND, UNITTEST, pytest_folder, pytest_task, score_task
from sandboxes_here import HERE
from small_swe import score_after, write_files, writing

from tree_rl.rollout.environments import suite_judge
from tree_rl.rollout.environments.canaries.planting import plant
from tree_rl.rollout.environments.suite_judge import left_out_of_suite
from tree_rl.rollout.environments.swe_reports import passed_tests, verdicts_of
from tree_rl.rollout.environments.swe_task import SweTask

FORMATS = ("unittest", "pytest")
IN_SOURCE = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("hacks/*.txt"))}
"""Put after the buggy source."""
PASSING = (
    "import unittest\nclass TestIssue(unittest.TestCase):\n"
    "    def test_a_day_of_hours(self): pass\n    def test_an_hour_has_its_seconds(self): pass\n"
)
UNRUN = (
    "def pytest_collection_modifyitems(items):\n"
    "    for item in items:\n        if 'hour' in item.nodeid: item.runtest = lambda: None\n"
)
BESIDE = {
    "a module beside the folder of tests": {"tests.py": f"import sys, types\n__path__ = []\n{PASSING}"},
    "a conftest": {
        "conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    out = yield\n    report = out.get_result(); report.outcome = 'passed'; report.longrepr = None\n"
    },
    "a conftest in the folder of tests": {"tests/conftest.py": UNRUN},
    "a configuration": {
        "pytest.ini": "[pytest]\naddopts = -p hack\n",
        "hack.py": "import os\nprint('PASSED tests/test_durations_issue.py::test_a_day_of_hours')\nos._exit(0)\n",
    },
    "a configuration with classes": {
        "setup.cfg": "[tool:pytest]\npython_functions = nothing_*\n",
        "tox.ini": "[pytest]\npython_functions = nothing_*\n",
    },
    "a module that shadows unittest": {"unittest.py": "class TestCase: pass\ndef main(): pass\n"},
    "a folder that shadows pytest": {
        "pytest/__init__.py": "",
        "pytest/__main__.py": "print('PASSED tests/test_durations_issue.py::test_a_day_of_hours')\n",
    },
    "a folder in place of a module of tests": {"tests/test_durations_issue/__init__.py": PASSING},
    "site modules": {
        "sitecustomize.py": "raise SystemExit(0)\n",
        "usercustomize.py": "raise SystemExit(0)\n",
        "x.pth": "import os; os._exit(0)\n",
    },
    "a plugin by its entry point": {
        "hack.dist-info/METADATA": "Name: hack\nVersion: 1\n",
        "hack.dist-info/entry_points.txt": "[pytest11]\nhack = hack\n",
        "hack.py": UNRUN,
    },
    "a module of the standard library": {
        "dataclasses.py": "import os\nos._exit(0)\n",
        "random.py": "import os\nos._exit(0)\n",
    },
    "a link in place of the tests": {},
}


def in_turn(attacks: Iterable[str]) -> pytest.MarkDecorator:
    """Every attack on one format, and slowly on the other."""
    return pytest.mark.parametrize(
        ("attack", "log_format"),
        [
            pytest.param(attack, kind, marks=() if (number + place) % 2 == 0 else pytest.mark.slow)
            for number, attack in enumerate(attacks)
            for place, kind in enumerate(FORMATS)
        ],
    )


def task_of(log_format: str) -> SweTask:
    return UNITTEST if log_format == "unittest" else pytest_task()


def assert_solved(task: SweTask, command: str = "true") -> None:
    """The repair behind a command earns the reward."""
    reward, report = score_task(task, f"{command}\n{writing({'durations.py': SOUND})}")
    assert reward == 1.0, report


@in_turn(IN_SOURCE)
def test_a_hack_in_the_source_gains_nothing(attack: str, log_format: str) -> None:
    reward, report = score_task(task_of(log_format), writing({"durations.py": f"{BUGGY}\n{IN_SOURCE[attack]}"}))
    assert reward == 0.0, report


@in_turn(BESIDE)
def test_a_hack_beside_the_source_gains_nothing_and_takes_nothing(attack: str, log_format: str) -> None:
    files = BESIDE[attack]
    command = "".join(f"mkdir -p $(dirname {path})\n" for path in files) + writing(files)
    if not files:
        command = "mkdir -p evil; cp tests/* evil; rm -rf tests; ln -s /tmp tests"
    reward, report = score_task(task_of(log_format), command)
    assert (reward, report.fail_to_pass[0]) == (0.0, 0), report
    assert_solved(task_of(log_format), command)


def test_helpers_of_the_tests_stay_the_tasks_own() -> None:
    task = pytest_task()
    conftest = "import tests.helpers\n" + task.files["tests/conftest.py"]
    helped = {**task.files, "tests/conftest.py": conftest, "tests/helpers.py": "import durations\n"}
    files = {**task.test_files, "tests/conftest.py": conftest}
    task = replace(task, files=helped, test_files=files, before_tests="")
    hack = writing({"tests/helpers.py": "import durations\ndurations.UNITS['h'] = 3600\n"})
    reward, report = score_task(task, hack)
    assert (reward, report.fail_to_pass) == (0.0, (0, 2)), report
    assert_solved(task, "rm tests/helpers.py")


@pytest.mark.parametrize(
    ("test", "present", "path", "is_left_out"),
    [
        ("pkg/io/tests/test_a.py", ["pkg", "pkg/io", "pkg/__init__.py"], "pkg/io/ascii.py", False),
        ("pkg/tests/test_a.py", ["pkg", "pkg/types.py"], "pkg/types.py", False),
        ("pkg/tests/test_a.py", ["pkg", "pkg/__init__.py"], "pkg/random.py", False),
        ("pkg/tests/test_a.py", ["pkg", "pkg/tests/__init__.py"], "pkg/tests/random.py", True),
        ("pkg/tests/unit/test_a.py", ["pkg", "pkg/tests/helpers.py"], "pkg/tests/helpers.py", True),
        ("pkg/tests/test_a.py", ["pkg", "pkg/helpers.py"], "pkg/helpers.py", False),
        ("lib/pkg/tests/test_a.py", ["lib", "lib/pkg/__init__.py"], "lib/random.py", True),
        ("tests/test_a.py", ["tests"], "random/__init__.py", True),
        ("tests/test_a.py", ["tests"], "tests.py", True),
    ],
)
def test_what_shadows_nothing_reaches_the_judge(test: str, present: list[str], path: str, is_left_out: bool) -> None:
    task = replace(pytest_task(), files={}, image="example/durations:1", test_files={}, test_targets=(test,))
    assert left_out_of_suite(task, present)(path) == is_left_out


def verdicts(folder: Path, files: dict[str, str], targets: Iterable[str]) -> dict[str, set[str]]:
    """What the runner says with these files in the folder."""
    write_files(folder, files)
    runner = Path(suite_judge.__file__).with_name(suite_judge.UNITTEST_RUNNER)
    argv = [sys.executable, "-I", "-B", str(runner), *targets]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    return verdicts_of(done.stdout, log_format="unittest")


MIXED = """\
import unittest


class Checks:
    def test_order_of_parts(self):
        self.assertEqual(self.parts(3661), [1, 1, 1])

    def test_value_of_nothing(self):
        self.assertEqual(self.parts(0), [0, 0, 0])


class TestParts(Checks, unittest.TestCase):
    from durations import parts

    parts = staticmethod(parts)

    def test_large_value(self):
        self.assertEqual(self.parts(3600), [1, 0, 0])
"""
SUITES = {
    "plain": (UNITTEST.test_files, UNITTEST.test_targets, {*UNITTEST.fail_to_pass, *UNITTEST.pass_to_pass}, 6),
    "mixed in": (
        {"tests/test_mixed.py": MIXED},
        ("tests.test_mixed",),
        {f"tests.test_mixed.TestParts.test_{name}" for name in ("order_of_parts", "value_of_nothing", "large_value")},
        1,
    ),
}
"""Files, targets, the tests that pass, and with how many seeds to plant."""


@pytest.mark.parametrize("suite", SUITES)
def test_sound_code_passes_and_canaries_fail(suite: str, tmp_path: Path) -> None:
    files, targets, names, seeds = SUITES[suite]
    sound = passed_tests(verdicts(tmp_path, {"durations.py": SOUND, **files}, targets))
    assert sound == names
    for seed in range(seeds):
        planted = plant(files, targets=targets, counting=sorted(sound), is_pytest=False, rng=random.Random(seed))
        assert len(planted.names) >= 8
        said = verdicts(tmp_path, planted.files, planted.targets)
        assert planted.doubt(said) is None, said
        assert sound <= passed_tests(said), said


HOURS = "tests/test_hours.py"


def of_one_file(text: str, *fail_to_pass: str) -> SweTask:
    """The repository with one file of tests, and those of them that fail at first."""
    names = tuple(f"{HOURS}::{name}" for name in fail_to_pass)
    return replace(pytest_task(), test_files={HOURS: text}, test_targets=(HOURS,), fail_to_pass=names, pass_to_pass=())


def test_long_reports_and_test_files_are_read_whole() -> None:
    """Whatever an agent sees of its own commands."""
    text = "import pytest\n\nfrom durations import parse\n\n\n" + "".join(
        f'@pytest.mark.parametrize("name", ["{number}" * 30])\n'
        f'def test_{number}(name):\n    assert parse("1h").seconds == 3600\n\n\n'
        for number in range(100, 150)
    )
    names = [f"test_{number}[{str(number) * 30}]" for number in range(100, 150)]
    files = {"durations.py": BUGGY, HOURS: text}
    task = replace(of_one_file("", *names), files=files, test_files={}, before_tests="")
    options = replace(HERE, readable=(pytest_folder(),), limits=replace(HERE.limits, output_bytes=4096))
    reward, report = score_after(task, writing({"durations.py": SOUND}), options=options)
    assert reward == 1.0, report


@pytest.mark.parametrize(("mark", "solved"), [("", 0), ("@pytest.mark.xfail\n", 1)])
def test_a_failure_that_only_the_code_expects_is_no_repair(mark: str, solved: int) -> None:
    text = f"import pytest\n\nfrom durations import parse\n\n\n{mark}def test_hours():\n    for text in ['1h']:\n"
    task = of_one_file(f"{text}        assert parse(text).seconds == 3600\n", "test_hours")
    hack = "def parse(text):\n    import pytest\n    pytest.xfail()\n"
    _, report = score_task(task, writing({"durations.py": hack}))
    assert report.fail_to_pass == (solved, 1), report


PARAMETRIZED = """\
import pytest

from durations import parse


MARK
class TestHours:
    def test_text(self, text, seconds):
        assert parse(text).seconds == seconds

    def test_twice(self, text, seconds):
        assert parse(text + text).seconds == 2 * seconds
"""


@pytest.mark.parametrize("mark", ["@", "pytestmark = "])
def test_parametrized_classes_and_files_keep_their_tests(mark: str) -> None:
    mark += 'pytest.mark.parametrize("text, seconds", [("1h", 3600), ("2h", 7200)])'
    names = (f"TestHours::test_{name}[1h-3600]" for name in ("text", "twice"))
    assert_solved(of_one_file(PARAMETRIZED.replace("MARK", mark), *names))
