"""Tracked files name no registry and no path of one machine, and stay small enough to read."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".txt", ".jinja", ".json", ".jsonl", ".cfg", ".html", ""}
NOT_FOR_THE_REPOSITORY = {
    "package registry": re.compile(r"pypi\.(org|python)|pythonhosted\.|download\.pytorch\.|/opt/(wheels|pypi)|nexus\."),
    "path of one machine": re.compile(r"(?<![\w.$}/-])/(work/(main|shared)|home/[a-z]|Users/[a-z])"),
}
MOST_LINES = {"kernels": 600, "tree_rl": 400}
MOST_FUNCTION_LINES = 100


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("kind", NOT_FOR_THE_REPOSITORY)
def test_no_tracked_file_names_a(kind: str) -> None:
    files = [path for path in tracked_files() if path.suffix in TEXT]
    assert len(files) > 10
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files
        for match in NOT_FOR_THE_REPOSITORY[kind].finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


@pytest.mark.parametrize("folder", MOST_LINES)
def test_no_module_outgrows_its_reader(folder: str) -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert lines
    assert not {name: count for name, count in lines.items() if count > MOST_LINES[folder]}


def test_no_function_outgrows_a_screen() -> None:
    long = {}
    for path in (path for folder in MOST_LINES for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert not long
