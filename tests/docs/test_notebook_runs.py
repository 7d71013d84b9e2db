"""The notebook runs as it stands and prints what it shows."""

import json
from typing import Any

import pytest
from run_notebook import run_cells
from shell_blocks import ROOT

NOTEBOOK = ROOT / "examples" / "prefix_trees_in_60_lines.ipynb"


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def texts(notebook: dict[str, Any]) -> list[str]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(output["text"]) for cell in cells for output in cell["outputs"] if "text" in output]


@pytest.mark.slow
def test_it_prints_what_it_shows(notebook: dict[str, Any]) -> None:
    ran = run_cells(notebook)
    assert texts(ran) == texts(notebook), (
        "run: python tests/docs/run_notebook.py examples/prefix_trees_in_60_lines.ipynb"
    )
    assert "gradients of the rows to 1e-5" in texts(ran)[-1]
    drawn = [output["data"] for cell in ran["cells"] for output in cell.get("outputs", ()) if "data" in output]
    shown = ROOT / "docs" / "images" / "how_it_works" / "four_rows.svg"
    assert ["".join(data["image/svg+xml"]) + "\n" for data in drawn] == [shown.read_text(encoding="utf-8")]
