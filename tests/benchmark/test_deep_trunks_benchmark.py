"""Every plan of the deep-trunk benchmark runs on a CPU and finds the same loss and gradients."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tree_rl.benchmark.results import read_csv

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "deep_trunks.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("deep_trunks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plans_agree(benchmark: Any) -> None:
    plans = ["whole", "offloaded", "offloaded:1+tiled:16", "partitioned:60", "partitioned:60+offloaded+relays_on_host"]
    sizes = {"model": "tiny", "layers": None, "trunk": 200, "branches": 3, "branch_tokens": 30}
    args = argparse.Namespace(**sizes, plans=plans, liger=False, repeats=1)
    rows = list(benchmark.measured(args, torch.device("cpu")))
    assert [row["plan"] for row in rows] == plans
    assert [row["partitions"] for row in rows[:3]] == [1, 1, 1] and rows[3]["partitions"] > 3
    for row in rows:
        assert row["failed"] == "" and row["unique"] == 290
        assert row["loss_deviation"] < 1e-6 and row["gradient_norm_deviation"] < 1e-5


def test_a_smaller_budget_runs_as_a_step_would_choose_and_computes_the_same(benchmark: Any) -> None:
    sizes = {"model": "tiny", "layers": None, "trunk": 200, "branches": 3, "branch_tokens": 30}
    args = argparse.Namespace(**sizes, plans=["budget:400", "budget:100"], liger=False, repeats=1)
    large, small = benchmark.measured(args, torch.device("cpu"))
    assert large["plan"] == "budget:400 (whole)" and large["partitions"] == 1
    assert small["partitions"] > 1 and small["predicted_gib"] < large["predicted_gib"]
    assert small["loss_deviation"] < 1e-6 and small["gradient_norm_deviation"] < 1e-5


def test_unknown_plans_are_refused(benchmark: Any) -> None:
    with pytest.raises(ValueError, match="--plans halved"):
        benchmark.Plan.parse("halved", layers=2)


def test_verdicts_follow_from_the_rows(benchmark: Any) -> None:
    folder = SCRIPT.parents[1] / "docs" / "benchmarks"
    small = read_csv(folder / "deep_trunks_8b_36_131072_2x8192.csv")
    rows = read_csv(folder / "deep_trunks_8b_8_131072_2x8192.csv")
    assert "offloaded: 55.4 GiB (whole: 93.5), 0.970 of the whole run's time, met" in benchmark.verdict(small)
    text = benchmark.verdict(rows, small)
    assert "5 budgets, largest rise of the peak 0.000, met" in text and "by 0.074, met" in text
    assert "0.936 of the small case's, met" in text and "missed" not in text
    slow = [row | {"tflops": float(row["tflops"]) * 0.9} for row in rows]
    assert "0.842 of the small case's, missed" in benchmark.verdict(slow, small)
    # The peak of the third of five budgets rises by 3 % over the second's, and so leaves its prediction.
    wrong = [dict(row) for row in rows]
    wrong[2]["peak_gib"] = f"{1.03 * float(rows[1]['peak_gib']):.4f}"
    text = benchmark.verdict(wrong)
    assert "largest rise of the peak 0.030, missed" in text and text.count("missed") == 2
    failed = [{"plan": "whole", "failed": "OutOfMemoryError"}, *rows]
    assert benchmark.verdict(failed).startswith("whole: OutOfMemoryError\n5 budgets")
