"""The gateway's benchmark runs small: clients of its own, records that are what the model gave, a row of figures."""

import subprocess
import sys
from pathlib import Path

import pytest

from tree_rl.benchmark.results import read_csv

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_load_is_timed(qwen_tokenizer: Path, tmp_path: Path) -> None:
    table = tmp_path / "gateway.csv"
    command = [sys.executable, ROOT / "benchmarks" / "gateway_overhead.py", qwen_tokenizer, "--csv", table]
    subprocess.run([*command, "--load", "2x3", "--share-cores"], check=True, timeout=900)
    (row,) = read_csv(table)
    assert (row["sessions"], row["calls"]) == ("2", "6") and int(row["longest prompt"]) > 1_000
    assert 0 < float(row["gateway ms"]) <= float(row["gateway ms p90"]) and float(row["longest callback ms"]) > 0
