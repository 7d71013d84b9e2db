"""Benchmarks behind docs/scale.md: the fit of collectives, the check of predictions, trees of a wanted size."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cluster_check  # noqa: E402
import collectives  # noqa: E402
from many_gpus import shares  # noqa: E402

from tree_rl.benchmark.results import read_csv  # noqa: E402
from tree_rl.tree import Forest  # noqa: E402

DOCS = ROOT / "docs" / "benchmarks"


@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e12), st.sampled_from([2, 4, 8]))
def test_a_fit_finds_latency_and_bandwidth(latency: float, bandwidth: float, ranks: int) -> None:
    # From sizes that latency rules to sizes that bandwidth rules.
    sizes = [latency * bandwidth * factor for factor in (0.01, 0.1, 1, 10, 100)]
    seconds = [latency + size * (ranks - 1) / ranks / bandwidth for size in sizes]
    assert collectives.fit(sizes, seconds, ranks) == pytest.approx((latency, bandwidth), rel=1e-6)


def test_a_latency_is_never_negative() -> None:
    # Twice the bytes take more than twice the time: a line through these points starts below zero.
    latency, bandwidth = collectives.fit([1e6, 2e6, 4e6], [1e-3, 2.2e-3, 5e-3], 2)
    assert latency == 0
    assert 0.4e9 < bandwidth < 0.5e9


def test_a_bandwidth_is_never_negative() -> None:
    # Noise made the largest the fastest: what is left is the mean, weighted as the fit weighs it.
    latency, bandwidth = collectives.fit([1e6, 2e6, 4e6], [5e-3, 4e-3, 2e-3], 2)
    assert bandwidth == float("inf")
    assert 2e-3 < latency < 5e-3


def test_the_table_of_predictions_is_that_of_the_measured_steps() -> None:
    steps, measured = read_csv(DOCS / "scale_steps.csv"), read_csv(DOCS / "collectives.csv")
    lines = cluster_check.check(steps, measured)
    published = read_csv(DOCS / "scale_check.csv")
    assert len(lines) == len(published) > 10
    for line, row in zip(lines, published, strict=True):
        for name in ("measured_s", "predicted_s", "error"):
            assert float(line[name]) == pytest.approx(float(row[name]), rel=1e-4, abs=1e-5)
    assert cluster_check.verdicts(lines) == [
        "1 GPUs: off by 12.4% at most, target 10%: missed",
        "2 GPUs: off by 7.9% at most, target 10%: met",
    ]


def test_without_one_gpu_nothing_sets_the_rate() -> None:
    steps = [row for row in read_csv(DOCS / "scale_steps.csv") if row["gpus"] != "1"]
    with pytest.raises(ValueError, match="expected a row on one GPU"):
        cluster_check.check(steps, [])


@pytest.mark.parametrize("tokens", [2_000, 16_384, 32_768, 100_000])
def test_drawn_trees_have_the_tokens_that_were_asked_for(tokens: int) -> None:
    batch = shares.drawn_trees(tokens, 8192, 1000)
    rows_of: dict[str, list[np.ndarray]] = {}
    for row, group in zip(batch.rows, batch.groups, strict=True):
        rows_of.setdefault(str(group), []).append(np.asarray(row))
    assert sum(Forest.from_rows(group).num_unique for group in rows_of.values()) == pytest.approx(tokens, rel=0.35)


def test_collectives_are_measured_by_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "collectives.csv"
    script = ROOT / "benchmarks" / "collectives.py"
    sizes = ["--megabytes", "1", "2", "4", "--repeats", "2", "--out", str(out), "--commit", "abc"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run([*launch, *sizes], check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["collective"], row["bytes"]) for row in rows} == {
        (name, str(size << 20)) for name in ("all_gather", "all_to_all") for size in (1, 2, 4)
    }
    assert all(float(row["seconds_low"]) <= float(row["seconds"]) <= float(row["seconds_high"]) for row in rows)
    assert all(float(row["bandwidth"]) > 0 <= float(row["latency"]) for row in rows)
