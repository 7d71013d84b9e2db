"""Small software tasks that need no Docker: repositories with one injected bug each, as rows for verl.

Usage: python recipes/swe_tasks/generate.py DIRECTORY [--test-tasks 6]

A folder of `repositories/` is a correct little repository with tests that the agent sees (`tests/`), tests that it does
not (`hidden/`), and `task.toml`: the problem in words and the text whose replacement is the bug. Deterministic.
"""

import argparse
import ast
import json
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

from tree_rl.rollout.environments.swe_task import SweTask

REPOSITORIES = Path(__file__).parent / "repositories"
DATA_SOURCE = "tree_rl/small_swe"
AGENT = "tree_gateway_agent"
TEST_COMMAND = "python3 -I -B {runner} {nonce} {tests}"
# Everything that looks like a test goes before the task's own tests come: edited, added and linked ones.
BEFORE_TESTS = "chmod -R u+rwX . 2>/dev/null; rm -rf tests hidden"
SYSTEM = "You are a careful programmer. You repair a small Python repository by running shell commands in it."
REQUEST = """\
Solve this issue of the repository in the current directory:

{statement}

Look at the files, repair the cause in the source files, and check your repair: `python3 -m unittest discover tests`
runs the present tests. Do not change the tests. Stop when the issue is solved."""


def read_texts(folder: Path) -> dict[str, str]:
    """Python files below a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))
    }


def test_names(path: str, source: str) -> list[str]:
    """Ids of the tests of a file as unittest reports them."""
    module = path.removesuffix(".py").replace("/", ".")
    return [
        f"{module}.{item.name}.{test.name}"
        for item in ast.parse(source).body
        if isinstance(item, ast.ClassDef)
        for test in item.body
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_")
    ]


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
    texts = read_texts(folder)
    hidden = {path.replace("hidden/", "tests/"): text for path, text in texts.items() if path.startswith("hidden/")}
    visible = {path: text for path, text in texts.items() if path.startswith("tests/")}
    right = {path: text for path, text in texts.items() if "/" not in path}
    wrong = dict(right)
    for bug in (described, *described.get("more", ())):
        inject(wrong, bug, folder.name)
    return SweTask(
        instance_id=folder.name,
        problem_statement=described["statement"].strip(),
        files={**wrong, **visible},
        test_command=TEST_COMMAND,
        test_targets=tuple(path.removesuffix(".py").replace("/", ".") for path in (*hidden, *visible)),
        fail_to_pass=tuple(name for path, text in hidden.items() for name in test_names(path, text)),
        pass_to_pass=tuple(name for path, text in visible.items() for name in test_names(path, text)),
        before_tests=BEFORE_TESTS,
        test_files={**visible, **hidden},
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
