"""Benchmarks of several GPUs: ranks get all work once, shared tokens change no gradient, verdicts follow from rows."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from many_gpus_runs import ROOT, run_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))

from many_gpus import shares, verdicts

from tree_rl.benchmark.batch import Batch, agent_batch
from tree_rl.benchmark.model_sizes import MODEL_SIZES
from tree_rl.benchmark.results import read_csv
from tree_rl.cost.balance.batch import paths_of_groups

SHAPE = MODEL_SIZES["tiny"].shape


def unequal_trees(num_groups: int, more_tokens: int = 25) -> Batch:
    """Groups of which each next one has longer rows."""
    parts = [
        agent_batch(
            por=0.5, num_rows=3, row_tokens=40 + more_tokens * index, num_groups=1, trained_share=0.3, vocab=SHAPE.vocab
        )
        for index in range(num_groups)
    ]
    return Batch(
        name="unequal",
        rows=tuple(row for part in parts for row in part.rows),
        trained=tuple(trained for part in parts for trained in part.trained),
        groups=tuple(str(index) for index, part in enumerate(parts) for _ in part.groups),
        advantage_B=np.concatenate([part.advantage_B for part in parts]),
    )


@pytest.mark.parametrize("arm", shares.ARMS)
def test_every_row_is_dealt_once_and_by_whole_mini_batches(arm: str) -> None:
    one = unequal_trees(6)
    group_of_row = np.array([int(group) for group in one.groups])
    paths = paths_of_groups(group_of_row, list(one.rows), SHAPE.cost)
    rows_DC = shares.deal(arm, group_of_row, paths, 2, 3)
    assert [len(cells) for cells in rows_DC] == [3, 3]
    dealt = np.concatenate([content for cells in rows_DC for content in cells])
    assert sorted(dealt) == list(range(len(one.rows)))
    if arm in (shares.BALANCED, shares.WHOLE_GROUPS):
        cells = [{group_of_row[i] for cells in rows_DC for i in cells[cell]} for cell in range(3)]
        assert cells == [{0, 1}, {2, 3}, {4, 5}]


def test_the_trainers_layout_is_more_even_than_whole_groups() -> None:
    place = {"rank": 0, "world": 2, "shape": SHAPE, "mini_batches": 2}
    one = unequal_trees(3, more_tokens=5)
    even, whole = (shares.share_of(one, arm, **place) for arm in (shares.BALANCED, shares.WHOLE_GROUPS))
    assert even.imbalance < whole.imbalance - 0.1
    assert len(even.cells) == len(whole.cells) == 2


def test_each_rank_trains_a_copy_of_its_own_at_equal_work() -> None:
    one = unequal_trees(2)
    place = {"world": 3, "shape": SHAPE, "mini_batches": 2}
    for rank in range(3):
        share = shares.share_of(one, shares.EQUAL, rank=rank, **place)
        rows = [row for cell in share.cells for row in cell.rows]
        assert all(((row + 1009 * rank) % SHAPE.vocab == got).all() for row, got in zip(one.rows, rows, strict=True))
        assert share.imbalance == pytest.approx(1)


def test_a_rank_without_rows_is_refused() -> None:
    place = {"rank": 0, "world": 4, "shape": SHAPE, "mini_batches": 4}
    with pytest.raises(SystemExit, match="4 trees leave one of 4 ranks without rows in arm whole_groups"):
        shares.share_of(unequal_trees(1), shares.WHOLE_GROUPS, **place)


@pytest.mark.slow
def test_updates_in_mini_batches_are_measured_and_judged(tmp_path: Path) -> None:
    out = tmp_path / "scaling.csv"
    flags = ["--model", "tiny-a3b", "--shapes", "grpo", "--tokens", 600, "--row-tokens", 40, "--mini-batches", 2]
    flags += ["--arms", "balanced", "whole_groups", "--steps", 2, "--max-tokens", 900, "--commit", "abc"]
    flags += ["--scratch", tmp_path, "--out", out]
    run_ranks("scaling_gpus.py", 1, *flags)
    printed = run_ranks("scaling_gpus.py", 2, *flags)
    alone, balanced, whole = read_csv(out)
    assert [row["arm"] for row in (alone, balanced, whole)] == ["equal", "balanced", "whole_groups"]
    assert [int(row["updates"]) for row in (alone, balanced, whole)] == [6, 6, 12]
    assert float(whole["cost_error"]) >= 0 and len(whole["steps_s"].split()) == 2
    assert float(balanced["imbalance"]) <= float(whole["imbalance"]) + 1e-6
    assert "2 mini-batches, balanced, 2 GPUs" in printed and "target at least 0.92: " in printed
    assert "tree/cost_error, tiny-a3b 2 layers, 2 GPUs" in printed and "target at most 0.05: " in printed


@pytest.mark.slow
def test_two_ranks_that_share_a_trunk_find_the_gradient_of_one(tmp_path: Path) -> None:
    out = tmp_path / "trunk.csv"
    flags = ["--model", "tiny-qwen3.5", "--trunk", 193, "--branches", 3, "--branch-tokens", 65, "--steps", 1]
    flags += ["--commit", "abc", "--scratch", tmp_path, "--out", out]
    run_ranks("shared_trunk.py", 1, *flags)
    printed = run_ranks("shared_trunk.py", 2, *flags, "--sp", 2)
    # The engine refuses rows beyond the model's positions; the longest that is measured has 401,408 tokens.
    (config,) = tmp_path.glob("scaling_*/config.json")
    assert json.loads(config.read_text())["max_position_embeddings"] >= 401_408
    alone, shared = read_csv(out)
    assert [row["unique_tokens"] for row in (alone, shared)] == [str(193 + 3 * 65)] * 2
    assert float(shared["gradient_norm"]) == pytest.approx(float(alone["gradient_norm"]), rel=2e-5)
    assert float(alone["gradient_norm"]) > 1e-3
    # 0.9 of half of 3.5: the model has recurrent layers.
    assert "times as fast, target at least 1.575: " in printed


def trunk_row(**changes: object) -> dict[str, str]:
    row = {"model": "qwen3-8b", "layers": 4, "layer_kernels": "liger", "trunk": 131_072, "branches": 16}
    row |= {"branch_tokens": 8192, "gpus": 1, "sharing": 1, "failed": "", "seconds": 16.0, "peak_gib": 80.0}
    return {name: str(value) for name, value in (row | {"partitions": 1, "gradient_norm": 2.0} | changes).items()}


def test_verdicts_on_trunks_follow_from_rows() -> None:
    four = {"gpus": 4, "sharing": 4}
    text = verdicts.trunk_report([trunk_row(), trunk_row(**four, seconds=4.5, peak_gib=28.0, gradient_norm=2.002)])
    assert "3.56 times as fast, target at least 3.5: met; 0.350 of its memory, target at most 0.35: met" in text
    assert "gradient norm off by 1.0e-03" in text
    text = verdicts.trunk_report([trunk_row(), trunk_row(**four, seconds=4.6, peak_gib=29.0)])
    assert "target at least 3.5: missed" in text and "target at most 0.35: missed" in text
    text = verdicts.trunk_report([trunk_row(), trunk_row(gpus=2, sharing=2, seconds=9.0, peak_gib=55.0)])
    assert "1.78 times as fast, target at least 1.75: met; 0.688 of its memory, target at most 0.7: met" in text
    recurrent = [trunk_row(model="qwen3.5-4b"), trunk_row(model="qwen3.5-4b", **four, seconds=5.0, peak_gib=31.0)]
    assert "target at least 3.15: met" in verdicts.trunk_report(recurrent)
    assert "target at most 0.3889: met" in verdicts.trunk_report(recurrent)
    text = verdicts.trunk_report([trunk_row(failed="OutOfMemoryError"), trunk_row(**four)])
    assert "1 share: OutOfMemoryError" in text and "nothing on one GPU to compare with" in text


def test_verdicts_on_updates_follow_from_rows() -> None:
    row = {"model": "qwen3-8b", "layers": "4", "shape": "recorded", "trees_per_gpu": "12", "mini_batches": "4"}
    row |= {"forward_prefetch": "False", "imbalance": "1.1", "sharing": "1", "arm": "equal", "gpus": "1"}
    alone = row | {"steps_s": "1.00 1.02 0.98", "updates": "16", "cost_error": "0.051"}
    balanced = row | {"steps_s": "1.08", "arm": "balanced", "gpus": "4", "updates": "8", "cost_error": "0.04"}
    whole = balanced | {"steps_s": "1.5", "arm": "whole_groups", "updates": "16", "cost_error": "0.03"}
    one, two, three, *errors = verdicts.scaling_report([alone, balanced, whole]).splitlines()
    assert "t(1)/t(n)" not in one and "imbalance 1.100, t(1)/t(n) 0.926" in two and two.endswith("0.92: met")
    assert "t(1)/t(n) 0.667" in three and "target" not in three
    assert [line.split("updates: ")[1] for line in errors] == [
        "0.0510, target at most 0.05: missed",
        "0.0300, target at most 0.05: met",
    ]
    # Two GPUs that share a rank's tokens hold the work of one.
    shared = row | {"steps_s": "0.6", "gpus": "2", "sharing": "2"}
    assert "t(1)/t(n) 0.833" in verdicts.scaling_report([alone, shared])
