"""Rows of R2E-Gym (arXiv 2504.07164) as software tasks: a row contains the tests and the verdict of each."""

import ast
import json
import posixpath
from collections.abc import Mapping
from typing import Any

from tree_rl.rollout.environments.published_tasks import DIRECTORY, PYTEST, checked
from tree_rl.rollout.environments.swe_task import SweTask

COLUMNS = ("docker_image", "commit_hash", "problem_statement", "execution_result_content", "expected_output_json")
ACTIVATE = f"export PATH={DIRECTORY}/.venv/bin:$PATH PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning"
TESTS = "r2e_tests"
"""Folder of the tests in the repository."""
HIDE = f"rm -rf /{TESTS} {DIRECTORY}/{TESTS} {DIRECTORY}/run_tests.sh"
"""Command that deletes the tests from the image, because the agent must not read them."""


def from_r2e(row: Mapping[str, Any]) -> SweTask:
    """Convert a row of R2E-Gym, whose `run_tests.sh` is `pytest -rA r2e_tests`.

    Args:
        row: `COLUMNS`. `expected_output_json` maps a test (`function` or `Class.function`, without its file) to PASSED,
            FAILED or ERROR.

    Raises:
        ValueError: a field is missing or unreadable, or no file contains an expected test.
    """
    name = f"{row.get('repo_name', 'r2e')}__{row.get('commit_hash', '?')}"
    row = checked({"instance_id": name, **row}, *COLUMNS)
    try:
        executed, expected = (json.loads(row[key]) for key in ("execution_result_content", "expected_output_json"))
        files = {
            posixpath.join(TESTS, posixpath.basename(path)): code
            for path, code in zip(executed["test_file_names"], executed["test_file_codes"], strict=True)
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name}: expected JSON in expected_output_json, and test_file_names and test_file_codes in "
            f"execution_result_content: {type(error).__name__}: {error}"
        ) from error
    functions = {path: _functions(name, path, code) for path, code in files.items()}
    verdicts = {
        full: verdict
        for test, verdict in expected.items()
        for full in _full_names(name, test.split(" - ")[0], functions)
    }
    return SweTask(
        instance_id=name,
        problem_statement=row["problem_statement"].strip(),
        image=row["docker_image"],
        directory=DIRECTORY,
        prelude=ACTIVATE,
        setup=HIDE,
        test_command=PYTEST,
        test_targets=tuple(path for path in files if functions[path]),
        test_files=files,
        fail_to_pass=tuple(test for test, verdict in verdicts.items() if verdict == "PASSED"),
        must_fail=tuple(test for test, verdict in verdicts.items() if verdict != "PASSED"),
        log_format="pytest",
    )


def _functions(name: str, path: str, code: str) -> set[str]:
    """Tests of a file as `function` or `Class.function`, including inherited ones."""
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ValueError(f"{name}: {path} is no Python: {error}") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def of(node: ast.Module | ast.ClassDef) -> set[str]:
        own = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        above = [classes[base.id] for base in bases if isinstance(base, ast.Name) and base.id in classes]
        return own.union(*(of(base) for base in above if base is not node))

    return of(tree) | {f"{title}.{function}" for title, node in classes.items() for function in of(node)}


def _full_names(name: str, test: str, functions: Mapping[str, set[str]]) -> list[str]:
    """pytest's names of a test, for which R2E records no file: one name for every file that contains it."""
    plain, bracket, parameters = test.partition("[")
    held = [path for path, known in functions.items() if plain in known]
    if not held:
        raise ValueError(f"{name}: expected_output_json names {test!r}, which no file of the row holds; leave it out")
    return [f"{path}::{plain.replace('.', '::')}{bracket}{parameters}" for path in held]
