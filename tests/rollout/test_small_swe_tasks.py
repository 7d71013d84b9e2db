"""Every small software task is a task: its hidden cases fail, the reference solution passes them, nothing else does."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
from small_swe import GENERATOR, all_tasks, passed_with, write_files

from tree_rl.rollout.environments.swe_task import SweTask

KNOWN_WRONG = tomllib.loads(Path(__file__).with_name("known_wrong_repairs.toml").read_text(encoding="utf-8"))
SAMPLE = sorted(all_tasks())[::6]
EVERY_TASK = pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in all_tasks()]
)
"""A change of the judge shows in a sample; the slow tier plays them all."""


@pytest.mark.parametrize("name", all_tasks())
def test_hidden_cases_alone_fail_before_and_all_pass_with_the_reference_solution(name: str, tmp_path: Path) -> None:
    task = all_tasks()[name]
    hidden, visible = set(task.fail_to_pass), set(task.pass_to_pass)
    assert hidden | visible == {case.name for case in task.cases} and hidden and visible and not hidden & visible
    assert passed_with(tmp_path, task, {}) == visible
    assert passed_with(tmp_path, task, task.solution_files) == hidden | visible


@EVERY_TASK
def test_a_plausible_wrong_repair_fails(name: str, tmp_path: Path) -> None:
    task, edit = all_tasks()[name], KNOWN_WRONG[name]
    sources = {**task.files, **task.solution_files}
    (path,) = [path for path, text in sources.items() if text.count(edit["right"]) == 1]
    wrong = {**task.solution_files, path: sources[path].replace(edit["right"], edit["wrong"])}
    assert not set(task.fail_to_pass) <= passed_with(tmp_path, task, wrong)


EQUAL = """
class {name}({base}):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __call__ = __getattr__ = __add__ = __matmul__ = __truediv__ = __mul__ = lambda self, *_: self
    __contains__ = __lt__ = __le__ = __bool__ = lambda self, *_: True
    __float__ = lambda self: 0.0
    __round__ = lambda self, digits: self
"""
ERRORS = "KeyError, IndexError, ValueError, ZeroDivisionError, TypeError"
BASES = ("object", "list", "str")
STUBS = {
    **{value: f"return {value}" for value in ("None", "0", "''", "[]", "True")},
    "first argument": "return FIRST",
    "every error": f"raise type('AnyError', ({ERRORS}), {{}})('line 2')",
    **{f"a {base} equal to all": f"return Any_{base}()" for base in BASES},
}


class Stub(ast.NodeTransformer):
    """Replaces what functions do, constructors excepted."""

    def __init__(self, body: str) -> None:
        self.body = body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if node.name != "__init__":
            names = [argument.arg for argument in node.args.args]
            first = next((name for name in names if name != "self"), names[0] if names else "None")
            node.body = ast.parse(self.body.replace("FIRST", first)).body
            node.decorator_list = []
        return node


@EVERY_TASK
def test_no_stub_passes_a_hidden_case(name: str, tmp_path: Path) -> None:
    task = all_tasks()[name]
    hacks = "".join(EQUAL.format(name=f"Any_{base}", base=base) for base in BASES)
    sources = {path: text for path, text in {**task.files, **task.solution_files}.items() if "/" not in path}
    for stub, body in STUBS.items():
        stubs = {path: hacks + ast.unparse(Stub(body).visit(ast.parse(text))) for path, text in sources.items()}
        assert not set(task.fail_to_pass) & passed_with(tmp_path, task, stubs), stub


@EVERY_TASK
def test_the_tests_that_the_agent_sees_are_the_visible_cases(name: str, tmp_path: Path) -> None:
    task = all_tasks()[name]
    write_files(tmp_path, task.files)
    command = [sys.executable, "-B", "-m", "unittest", "discover", "tests"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={})
    assert f"Ran {len(task.pass_to_pass)} tests" in done.stderr and done.returncode == 0, done.stderr
    assert not any(
        case.program.splitlines()[-1] in str(task.files) for case in task.cases if case.name in task.fail_to_pass
    )


def test_the_statement_does_not_contain_the_solution() -> None:
    for task in all_tasks().values():
        for path, right in task.solution_files.items():
            added = {line.strip() for line in right.splitlines()} - {x.strip() for x in task.files[path].splitlines()}
            assert not any(line in task.problem_statement for line in added if len(line) > 12), task.instance_id


def test_rows_are_the_same_in_every_run_and_survive_parquet(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        subprocess.run([sys.executable, GENERATOR, tmp_path / folder], check=True, capture_output=True)
    assert (tmp_path / "a" / "tasks.jsonl").read_bytes() == (tmp_path / "b" / "tasks.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a" / "tasks.jsonl").read_text().splitlines()]
    stored = pd.concat([pd.read_parquet(tmp_path / "a" / f"{split}.parquet") for split in ("train", "test")])
    assert len(stored) == len(rows) == len(all_tasks())
    for _, row in stored.iterrows():
        task = SweTask.from_row(row["extra_info"]["swe"])
        assert task == all_tasks()[task.instance_id]
        assert task.problem_statement in row["prompt"][1]["content"]
