"""Small software tasks that need no Docker: repositories with one injected bug each, as rows for verl.

Usage: python recipes/swe_tasks/generate.py DIRECTORY [--test-tasks 6]

A folder of `repositories/` is a correct little repository with `task.toml`, the problem in words and the text whose
replacement is the bug, and `cases.toml`: programs and what they return. The agent sees the visible cases as unittest
code; the hidden ones fail before the repair. Deterministic.
"""

import argparse
import ast
import json
import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

import pandas as pd

from tree_rl.rollout.environments.cases import Case
from tree_rl.rollout.environments.swe_task import SweTask

REPOSITORIES = Path(__file__).parent / "repositories"
DATA_SOURCE = "tree_rl/small_swe"
AGENT = "tree_gateway_agent"
LINE_LENGTH = 100
SYSTEM = "You are a careful programmer. You repair a small Python repository by running shell commands in it."
REQUEST = """\
Solve this issue of the repository in the current directory:

{statement}

Look at the files, repair the cause in the source files, and check your repair: `python3 -m unittest discover tests`
runs the present tests. Do not change the tests. Stop when the issue is solved."""


def read_cases(folder: Path) -> tuple[list[Case], str]:
    """The cases of a task, called `visible.NAME` and `hidden.NAME`, and the visible ones as a unittest module."""
    tables = tomllib.loads((folder / "cases.toml").read_text(encoding="utf-8"))
    imports = tables["imports"].strip()
    cases, tests = [], []
    for kind in ("hidden", "visible"):
        for name, case in tables[kind].items():
            expected = {"raises": case["raises"]} if "raises" in case else {"value": json.loads(case["value"])}
            program = f"{imports}\n{case['program'].strip()}\n"
            cases.append(Case(name=f"{kind}.{name}", program=program, expected=json.dumps(expected)))
            if kind == "visible":
                body = method_body(case["program"].strip(), expected)
                tests.append(f"    def test_{name}(self):\n{indent(body, ' ' * 8)}")
    head = f"class Test{folder.name.title().replace('_', '')}(unittest.TestCase):"
    return cases, f"import unittest\n\n{imports}\n\n\n{head}\n" + "\n".join(tests)


def method_body(program: str, expected: dict[str, Any]) -> str:
    """A program as the body of a test method: a list that it returns is compared piece by piece.

    Raises:
        ValueError: it does not end by returning a value.
    """
    last = ast.parse(program).body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        raise ValueError(f"expected a program that ends with `return VALUE`, received {program!r}")
    lines = program.splitlines()[: last.lineno - 1]
    if "raises" in expected:
        call = ast.get_source_segment(program, last.value)
        lines += [f"with self.assertRaises({expected['raises']}):", f"    {call}"]
    else:
        is_split = isinstance(last.value, ast.List) and not any(isinstance(x, ast.Starred) for x in last.value.elts)
        pairs = zip(last.value.elts, expected["value"], strict=True) if is_split else [(last.value, expected["value"])]
        lines += [assertion(ast.get_source_segment(program, piece), value) for piece, value in pairs]
    return "\n".join(lines) + "\n"


def assertion(code: str, value: object) -> str:
    """A line, or four where it is long."""
    line = f"self.assertEqual({code}, {value!r})"
    return line if len(line) <= LINE_LENGTH else f"self.assertEqual(\n    {code},\n    {value!r},\n)"


def inject(sources: dict[str, str], bug: dict[str, str], name: str) -> None:
    """Replace the right text by the wrong one, in place.

    Raises:
        ValueError: the right text does not occur exactly once.
    """
    count = sources[bug["file"]].count(bug["right"])
    if count != 1:
        raise ValueError(f"{name}/task.toml: expected `right` once in {bug['file']}, found it {count} times")
    sources[bug["file"]] = sources[bug["file"]].replace(bug["right"], bug["wrong"])


def build_task(folder: Path) -> SweTask:
    """One task of one folder."""
    described = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    cases, visible_tests = read_cases(folder)
    right = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    wrong = dict(right)
    for bug in (described, *described.get("more", ())):
        inject(wrong, bug, folder.name)
    return SweTask(
        instance_id=folder.name,
        problem_statement=described["statement"].strip(),
        files={**wrong, f"tests/test_{folder.name}.py": visible_tests},
        log_format="cases",
        cases=tuple(cases),
        fail_to_pass=tuple(case.name for case in cases if case.name.startswith("hidden.")),
        pass_to_pass=tuple(case.name for case in cases if case.name.startswith("visible.")),
        solution_files={path: text for path, text in right.items() if wrong[path] != text},
    )


def build_tasks() -> list[SweTask]:
    """All tasks, by name."""
    return [build_task(path.parent) for path in sorted(REPOSITORIES.glob("*/task.toml"))]


def split_of(tasks: list[SweTask], num_test: int = 6) -> list[tuple[SweTask, str]]:
    """Every so many-th task is held out."""
    stride = len(tasks) // num_test if num_test else len(tasks) + 1
    return [(task, "test" if index % stride == stride - 1 else "train") for index, task in enumerate(tasks)]


def to_row(task: SweTask, index: int, split: str) -> dict[str, Any]:
    """A task as verl's RL data set reads it."""
    return {
        "data_source": DATA_SOURCE,
        "agent_name": AGENT,
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": REQUEST.format(statement=task.problem_statement)},
        ],
        "ability": "software",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": index, "split": split, "swe": task.to_row()},
    }


def main() -> None:
    """Write train.parquet, test.parquet and the same as tasks.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--test-tasks", type=int, default=6, help="held out from training")
    parser.add_argument("--train-tasks", type=int, default=None, help="the first so many; all by default")
    arguments = parser.parse_args()
    rows = [
        to_row(task, index, split) for index, (task, split) in enumerate(split_of(build_tasks(), arguments.test_tasks))
    ]
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        chosen = [row for row in rows if row["extra_info"]["split"] == split]
        chosen = chosen[: arguments.train_tasks] if split == "train" else chosen
        if chosen:
            pd.DataFrame(chosen).to_parquet(arguments.directory / f"{split}.parquet")
    with (arguments.directory / "tasks.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} tasks in {arguments.directory}")


if __name__ == "__main__":
    main()
