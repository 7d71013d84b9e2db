"""A field's docstring can be read without the line above: it says what the field is, and is no stub like "Of rows."."""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tree_rl", "kernels/tree_kernels", "benchmarks")
STUBS = frozenset({"Of", "As", "By", "To", "From", "In", "Whether"})


def field_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a field or constant."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for field, text in pairwise(body) if isinstance(body, list) else ():
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign | ast.Assign) and is_text and isinstance(text.value.value, str):
                yield text.lineno, text.value.value


def stubs(source: str) -> list[int]:
    return [line for line, text in field_docstrings(source) if (text.split() or ["Of"])[0].rstrip(",.") in STUBS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_is_a_stub(folder: str) -> None:
    found = {path: stubs(path.read_text(encoding="utf-8")) for path in (ROOT / folder).rglob("*.py")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in found.items() if lines} == {}


def test_a_stub_is_found() -> None:
    assert stubs('rows: int\n"""Of the batch."""\nsize = 1\n"""Rows of the batch."""\n') == [2]
