"""Every plan of the deep-trunk benchmark runs on a CPU and finds the same loss and gradients."""

import argparse
from pathlib import Path

import deep_trunks
import pytest
import torch

from tree_rl.benchmark.results import read_csv

ROOT = Path(__file__).parents[2]
GIVEN = ["whole", "offloaded:1+tiled:16", "partitioned:60+offloaded+relays_on_host", "budget:400", "budget:100"]


def test_plans_agree_and_unknown_ones_are_refused() -> None:
    sizes = {"model": "tiny", "layers": None, "trunk": 200, "branches": 3, "branch_tokens": 30}
    args = argparse.Namespace(**sizes, plans=GIVEN, liger=False, repeats=1)
    rows = list(deep_trunks.measured(args, torch.device("cpu")))
    assert [row["plan"].split(" (")[0] for row in rows] == GIVEN
    whole, tiled, cut, large, small = rows
    assert whole["partitions"] == tiled["partitions"] == large["partitions"] == 1 and cut["partitions"] > 3
    assert large["plan"] == "budget:400 (whole)"
    assert small["partitions"] > 1 and small["predicted_gib"] < large["predicted_gib"]
    for row in rows:
        assert row["failed"] == "" and row["unique"] == 290
        assert row["loss_deviation"] < 1e-6 and row["gradient_norm_deviation"] < 1e-5
    with pytest.raises(ValueError, match="--plans halved"):
        deep_trunks.Plan.parse("halved", layers=2)


def test_verdicts_follow_from_the_rows() -> None:
    folder = ROOT / "docs" / "benchmarks"
    small = read_csv(folder / "deep_trunks_8b_36_131072_2x8192.csv")
    rows = read_csv(folder / "deep_trunks_8b_8_131072_2x8192.csv")
    assert "offloaded: 55.4 GiB (whole: 93.5), 0.970 of the whole run's time, met" in deep_trunks.verdict(small)
    text = deep_trunks.verdict(rows)
    assert "5 budgets, largest rise of the peak 0.000, met" in text and "by 0.074, met" in text
    assert "missed" not in text
    # The peak of the third of five budgets rises by 3 % over the second's, and so leaves its prediction.
    wrong = [dict(row) for row in rows]
    wrong[2]["peak_gib"] = f"{1.03 * float(rows[1]['peak_gib']):.4f}"
    assert deep_trunks.verdict(wrong).count("missed") == 2
