"""The quickstart as its script runs it, cut short: every phase works and the report is written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_quickstart_runs_to_its_report(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "recipes"),
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "2",
    }
    sizes = ["--demonstrations", "120", "--sft-steps", "20", "--steps", "10", "--repeats", "1"]
    finished = subprocess.run(
        [sys.executable, "-m", "quickstart.run", "--output", str(tmp_path / "run"), *sizes],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-3000:]
    assert "step  10  reward" in finished.stdout
    assert "self-check" in finished.stdout and "speed-up of this update" in finished.stdout
    assert re.search(
        r"step on trees; with this update alone as rows +[\d.]+ s, [\d.]+ s \([\d.]+ times\)", finished.stdout
    )
    assert (tmp_path / "run" / "report.html").exists()
