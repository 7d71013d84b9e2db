"""Every plan of the deep-trunk benchmark runs on a CPU and finds the same loss and gradients."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

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
