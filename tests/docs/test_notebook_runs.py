"""The notebook runs as it stands and prints what it shows."""

import ast
import contextlib
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from shell_blocks import ROOT

NOTEBOOK = ROOT / "examples" / "prefix_trees_in_60_lines.ipynb"


def run_cells(sources: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What each cell prints, and the value of its last line if that is an expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for source in sources:
        tree, said = ast.parse(source), io.StringIO()
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(said):
            exec(compile(tree, "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
        yield said.getvalue(), value


@pytest.mark.slow
def test_it_prints_what_it_shows() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(text for output in cell["outputs"] for text in output.get("text", ())) for cell in cells]
    printed, values = zip(*run_cells("".join(cell["source"]) for cell in cells), strict=True)
    assert list(printed) == shown, "run its cells again"
    assert "gradients of the rows to 1e-5" in printed[-1]
    picture = ROOT / "docs" / "images" / "how_it_works" / "four_rows.svg"
    drawn = [value._repr_svg_() + "\n" for value in values if hasattr(value, "_repr_svg_")]
    assert drawn == [picture.read_text("utf-8")]
