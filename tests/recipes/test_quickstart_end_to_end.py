"""The quickstart as its script runs it, cut short: every phase works and the report is written."""

import re
import sys
from pathlib import Path

import pytest
from finished_run import run

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_quickstart_runs_to_its_report(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(ROOT / "recipes"), "PYTHONSAFEPATH": "1", "TORCH_COMPILE_DISABLE": "1"}
    variables["COLUMNS"] = "120"  # the table breaks long lines elsewhere
    sizes = ["--demonstrations", "120", "--sft-steps", "20", "--steps", "10", "--repeats", "1"]
    command = [sys.executable, "-m", "quickstart.run", "--output", str(tmp_path / "run"), *sizes]
    printed = run(command, tmp_path, OMP_NUM_THREADS="2", **variables)
    assert "step  10  reward" in printed
    assert "self-check" in printed and "speed-up of this update" in printed
    assert re.search(r"step on trees; with this update alone as rows +[\d.]+ s, [\d.]+ s \([\d.]+ times\)", printed)
    assert (tmp_path / "run" / "report.html").exists()
