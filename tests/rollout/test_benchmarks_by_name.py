"""Benchmarks are named in the config, read from files with the published columns, and judged by their own rule.

The rows are written here in the published schema; a small repository stands in for the images.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from judged_tasks import score_task, with_pytest
from sandboxes_here import HERE
from small_swe import write_files, writing

from tree_rl.rollout.agents.agents_by_name import ENVIRONMENTS, check
from tree_rl.rollout.environments.benchmarks.named import BENCHMARKS
from tree_rl.rollout.environments.benchmarks.published_files import main, published_rows
from tree_rl.rollout.environments.benchmarks.r2e import from_r2e
from tree_rl.rollout.environments.benchmarks.terminal_bench import LOGS, from_terminal_bench
from tree_rl.rollout.environments.published_tasks import from_swe_bench, from_swe_smith
from tree_rl.rollout.environments.swe_reports import TestReport, is_full_reward, passed_tests, verdicts_of
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.sandbox.sandbox import SandboxError

ROWS = Path(__file__).parent / "published_rows"
R2E_TEST = """\
import unittest

from pkg.sums import add


class Base:
    def test_zero(self):
        assert add(0, 0) == 0


class TestAdd(Base, unittest.TestCase):
    def test_one(self):
        self.assertEqual(add(1, 2), 3)


def test_known_failure():
    assert add(1, 1) == 3
"""
R2E_ROW: dict[str, Any] = {
    "repo_name": "sums",
    "docker_image": "namanjain12/sums_final:0a1b2c3d",
    "commit_hash": "0a1b2c3d",
    "problem_statement": "[ISSUE]\nadd() subtracts.\n[/ISSUE]",
    "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": [R2E_TEST]}),
    "expected_output_json": json.dumps(
        {"TestAdd.test_zero": "PASSED", "TestAdd.test_one": "PASSED", "test_known_failure": "FAILED"}
    ),
}
BUGGY = {"pkg/__init__.py": "", "pkg/sums.py": "def add(a, b):\n    return a - b\n"}
REPAIR = "sed -i 's/a - b/a + b/' pkg/sums.py"
HARBOR = {
    "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "example/greet:1"\n',
    "instruction.md": "Write hello to greeting.txt.\n",
    "environment/Dockerfile": "FROM python:3.13\nWORKDIR /greet\n",
    "solution/solve.sh": "echo hello > greeting.txt\n",
    "tests/test.sh": 'python3 /tests/test_outputs.py && R=1.0 || R=0; echo $R > "$LOGS"/reward.txt\n',
    "tests/test_outputs.py": "assert open('greeting.txt').read() == 'hello\\n'\n",
}
OLD = {
    "task.yaml": "instruction: |-\n  Write hello to greeting.txt.\nparser_name: pytest\n",
    "Dockerfile": "FROM python:3.13\n",
    "run-tests.sh": "python3 $TEST_DIR/test_outputs.py\n",
    "tests/test_outputs.py": HARBOR["tests/test_outputs.py"],
}


def row_of(name: str) -> dict[str, Any]:
    if name == "r2e":
        return R2E_ROW
    if name == "terminal_bench":
        return {"name": "greet", "files": HARBOR}
    file = "swe_smith" if name == "swe_smith" else "swe_bench"
    return json.loads((ROWS / f"{file}.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_published_row_asks_for_its_image_by_name(name: str) -> None:
    images = {
        "swe_bench_verified": "swebench/sweb.eval.x86_64.example_1776_sums-7:latest",
        "swe_gym": "xingyaoww/sweb.eval.x86_64.example_s_sums-7:latest",
        "swe_smith": "jyangballin/swesmith.x86_64.example_1776_sums.0a1b2c3d",
        "r2e": "namanjain12/sums_final:0a1b2c3d",
        "terminal_bench": "example/greet:1",
    }
    check({"environment": name, "agent": "react", "sandbox": {"backend": "docker"}}, is_this_machine=True)
    assert ENVIRONMENTS[name].endswith(BENCHMARKS[name].__name__)
    with pytest.raises(SandboxError, match=rf"needs the image {images[name]}; set .*sandbox\.backend=docker"):
        asyncio.run(BENCHMARKS[name](HERE).reset({"row": json.dumps(row_of(name))}))
    with pytest.raises(ValueError, match=rf"extra_info\.row: {name} expects a published row"):
        asyncio.run(BENCHMARKS[name](HERE).reset({"index": 0}))


@pytest.mark.parametrize(
    ("name", "kind"), [(name, ("parquet", "jsonl", "json")[at % 3]) for at, name in enumerate(BENCHMARKS)]
)
def test_a_published_file_becomes_a_data_set(name: str, kind: str, tmp_path: Path) -> None:
    published, out, row = tmp_path / f"published.{kind}", tmp_path / "out.parquet", row_of(name)
    if name == "terminal_bench":
        published = tmp_path / "tasks"
        write_files(published / "greet", row["files"])
    elif kind == "parquet":
        pd.DataFrame([row]).to_parquet(published)
    else:
        published.write_text(json.dumps(row) + "\n" if kind == "jsonl" else json.dumps([row]))
    main([name, str(published), str(out)])
    [made] = json.loads(pd.read_parquet(out).to_json(orient="records"))
    read = BENCHMARKS[name].read
    assert read(json.loads(made["extra_info"]["row"])) == read(row)
    assert read(row).problem_statement in made["prompt"][0]["content"]
    assert SweTask.from_row(json.loads(json.dumps(read(row).to_row()))) == read(row)
    assert "solve.sh" not in made["extra_info"]["row"]


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if BENCHMARKS[name].columns])
def test_a_wrong_file_says_which_column_is_missing(name: str, tmp_path: Path) -> None:
    published = tmp_path / "published.parquet"
    for column in BENCHMARKS[name].columns:
        pd.DataFrame([{key: value for key, value in row_of(name).items() if key != column}]).to_parquet(published)
        with pytest.raises(ValueError, match=rf"published\.parquet: {name} expects the column '{column}'"):
            published_rows(name, published)


def test_wrong_paths_end_in_one_line_and_replace_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = tmp_path / "published.jsonl"
    published.write_text("{}")
    for given, out, said in (
        (tmp_path / "none.parquet", tmp_path / "out.parquet", "none.parquet: no such file or folder"),
        (published, published, "published.jsonl: expected another file"),
        (published, tmp_path / "no" / "out.parquet", "out.parquet: expected another file, in a folder that exists"),
    ):
        with pytest.raises(SystemExit):
            main(["swe_gym", str(given), str(out)])
        assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["published.jsonl"] and published.read_text() == "{}"


def test_tasks_that_cannot_be_judged_are_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["swe_bench_verified", str(ROWS / "swe_bench.jsonl"), str(tmp_path / "out.parquet")])
    said = capsys.readouterr()
    assert "1 tasks in" in said.out and "django__django-1: the tests of django/django are not run by pytest" in said.err
    patch = "diff --git a/test-data/a.test b/test-data/a.test\n"
    for name, change, message in (
        ("swe_gym", {"test_patch": patch}, r"expected a test_patch with a Python file.*test-data/a\.test"),
        ("swe_smith", {"image_name": None}, "expected the field 'image_name'"),
        ("swe_smith", {"problem_statement": ""}, "expected a problem in words"),
        (
            "r2e",
            {"expected_output_json": '{"test_gone": "PASSED"}'},
            "names 'test_gone', which no file of the row holds",
        ),
        ("r2e", {"execution_result_content": "{}"}, "expected JSON in expected_output_json"),
        ("terminal_bench", {"files": OLD}, "the folder names no image; build Dockerfile"),
        ("terminal_bench", {"files": {**HARBOR, "tests/test.sh": ""}}, r"expected the file 'tests/test\.sh'"),
    ):
        with pytest.raises(ValueError, match=message):
            BENCHMARKS[name].read({**row_of(name), **change})


def judged(task: SweTask, command: str, **changes: Any) -> TestReport:
    """After one command of an agent, with files in place of the image, and pytest of this installation."""
    test_command = task.test_command.replace("python ", "python3 ")
    here = replace(task, image=None, directory=None, test_command=test_command, **changes)
    return score_task(with_pytest(here), command)[1]


def r2e_judged(command: str) -> TestReport:
    task = from_r2e(R2E_ROW)
    assert task.setup.startswith("rm -rf /r2e_tests /testbed/r2e_tests")
    files = {**BUGGY, "r2e_tests/test_1.py": R2E_TEST}
    return judged(task, command, prelude="", files=files, setup="rm -rf r2e_tests")


def test_r2e_expects_every_verdict_and_hides_its_tests() -> None:
    before = r2e_judged("true")
    assert (before.fail_to_pass, before.pass_to_pass) == ((1, 2), (1, 1)), before
    assert r2e_judged(f"! test -e r2e_tests && {REPAIR}").is_solved
    for path, text in (
        ("pkg/sums.py", "class Sum(int):\n    __eq__ = lambda a, b: True\ndef add(a, b): return Sum()\n"),
        ("r2e_tests/test_1.py", "class TestAdd:\n def test_one(s): 0\n def test_zero(s): 0\n"),
    ):
        assert not r2e_judged(f"mkdir r2e_tests\n{writing({path: text})}").is_solved


def terminal_judged(files: dict[str, str], command: str) -> TestReport:
    task = from_terminal_bench({"name": "greet", "files": files, "image": "example/greet:1"})
    assert task.directory == ("/greet" if files is HARBOR else "/app")
    assert all(name.startswith(f"{LOGS}/") for name in task.reward_files)
    test_command = task.test_command.replace("/logs/verifier", "logs").replace("/tests", "the-tests")
    test_files = {path: text.replace("/tests", "the-tests") for path, text in task.test_files.items()}
    here = replace(task, image=None, directory=None, files={"readme": ""}, prelude='export LOGS="$PWD/logs"')
    rewards = ("logs/reward.txt", "logs/reward.json")
    here = replace(here, test_command=test_command, test_files=test_files, reward_files=rewards)
    return score_task(here, command)[1]


@pytest.mark.parametrize("files", [HARBOR, OLD], ids=["task.toml", "task.yaml"])
def test_terminal_bench_rewards_what_its_verifier_writes(files: dict[str, str]) -> None:
    solve = "echo hello > greeting.txt"
    assert not terminal_judged(files, "true").is_solved
    assert terminal_judged(files, solve).is_solved
    faked = "mkdir logs the-tests; echo 1 > logs/reward.txt; echo 1 > logs/reward.json; echo true > the-tests/test.sh"
    assert not terminal_judged(files, faked).is_solved
    assert terminal_judged(files, f"{faked}; {solve}").is_solved


@pytest.mark.parametrize(
    "text, is_full",
    [
        *[(text, True) for text in ("1\n", "1.0", '{"reward": 1}')],
        *[(text, False) for text in ("0.5", "NaN", "Infinity", "", "1 1", "[1]", '{"score": 1}', '"1"', "true")],
    ],
)
def test_a_reward_file_holds_one_number(text: str, is_full: bool) -> None:
    assert is_full_reward(text) is is_full


SOUND = {
    **BUGGY,
    "pkg/sums.py": "def add(a, b):\n    return a + b\n",
    "tests/test_sums.py": "from pkg.sums import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
}
REPORT = """\
============ short test summary info ============
PASSED tests/test_sums.py::test_zero
XFAIL tests/test_sums.py::test_known - reason
FAILED tests/test_sums.py::test_add - assert -1 == 3
PASSED tests/test_sums.py::test_text[a b]
FAILED tests/test_sums.py::test_text[b a] - assert [1] == [2]
PASSED tests/test_sums.py::test_text[b b]
PASSED tests/test_sums.py::test_dash[(a - b]
FAILED tests/test_sums.py::test_dash[(a - c] - assert [1] - [2]
PASSED tests/test_sums.py::test_dash[a - c]
ERROR tests/test_other.py - ImportError
"""


def test_reports_of_pytest_are_read() -> None:
    assert passed_tests(verdicts_of(REPORT, log_format="pytest")) == {
        "tests/test_sums.py::test_zero",
        "tests/test_sums.py::test_known",
        "tests/test_sums.py::test_text[a b]",
        "tests/test_sums.py::test_text[a",
        "tests/test_sums.py::test_text[b b]",
        "tests/test_sums.py::test_dash[(a - b]",
        "tests/test_sums.py::test_dash[a - c]",
        "tests/test_sums.py::test_dash[a",
    }


def under_git(task: SweTask, command: str) -> TestReport:
    """Judged with the repository under git."""
    git = "git -c user.name=a -c user.email=a@b"
    start = f"git init -q && git add pkg tests && {git} commit -qm Sound && git tag sound"
    setup = f"{start} && {task.setup}" if task.setup else start
    return judged(task, command, prelude="export GIT_CONFIG_NOSYSTEM=1", files={**SOUND, **task.files}, setup=setup)


def test_the_bug_patch_of_swe_smith_is_applied_and_edited_tests_are_restored() -> None:
    task = from_swe_smith(row_of("swe_smith"))
    sound_test = SOUND["tests/test_sums.py"] + "\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    task = replace(task, files={**task.files, "tests/test_sums.py": sound_test})
    before = under_git(task, "true")
    assert (before.fail_to_pass, before.pass_to_pass) == ((0, 1), (1, 1)), before
    cheat = under_git(task, "printf 'def test_add(): pass\\ndef test_zero(): pass\\n' > tests/test_sums.py")
    assert not cheat.is_solved
    assert under_git(task, REPAIR).is_solved


def test_the_test_patch_of_swe_bench_is_applied_only_at_scoring() -> None:
    task = from_swe_bench(row_of("swe_bench_verified"))
    task = replace(task, before_tests=task.before_tests.replace("0123456789abcdef0123456789abcdef01234567", "sound"))
    broken = "sed -i 's/a + b/a - b/' pkg/sums.py; ! grep -q test_add tests/test_sums.py || rm -rf pkg"
    before = under_git(task, broken)
    assert (before.fail_to_pass, before.pass_to_pass) == ((0, 1), (1, 1)), before
    assert under_git(task, "rm -rf tests").is_solved
