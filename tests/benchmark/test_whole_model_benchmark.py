"""Whole models on several ranks: arms train the same rows, gradients are held against float32 rows, curves start alike.

Legend: D ranks.
"""

import csv
import os
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "whole_model.py"
sys.path.insert(0, str(SCRIPT.parent))

import whole_model  # noqa: E402
from many_gpus_runs import run_ranks  # noqa: E402
from whole_models import arms, gate, random_engine  # noqa: E402

from tree_rl.benchmark.against_verl.engines import join_process_group  # noqa: E402
from tree_rl.benchmark.batch import Batch, agent_batch  # noqa: E402
from tree_rl.benchmark.gradient_gate import GateError  # noqa: E402
from tree_rl.benchmark.model_sizes import MODEL_SIZES  # noqa: E402

TINY = MODEL_SIZES["tiny"]


def small_batch(*, groups: int = 2, rows: int = 4, por: float = 0.5, seed: int = 0) -> Batch:
    sizes = {"num_rows": rows, "row_tokens": 40, "num_groups": groups, "trained_share": 0.3, "vocab": TINY.shape.vocab}
    return agent_batch(por=por, seed=seed, **sizes)


# The search for a good layout is not what is tested.
@patch("tree_rl.cost.balance.batch.MOST_TRIALS", 100)
@settings(max_examples=20, deadline=None)
@given(groups=st.integers(1, 3), rows=st.integers(2, 5), world=st.integers(1, 3), seed=st.integers(0, 99))
def test_every_row_is_trained_once_in_every_arm(groups: int, rows: int, world: int, seed: int) -> None:
    batch = small_batch(groups=groups, rows=rows, por=0.4, seed=seed)
    if len(batch.rows) < world:
        return
    asked = {"max_tokens": 64, "stock_max_tokens": 8, "budget_shares": [], "world": world}
    names = (arms.TREE, arms.PACKED, arms.STOCK)
    try:
        found = [list(arms.arms_of(batch, TINY.shape, names, rank=rank, **asked)) for rank in range(world)]
    except SystemExit as error:
        # Fewer groups than ranks, and splitting them is not worth a rank.
        assert "raise --flat-tokens" in str(error)
        return
    expected = sorted((row.tobytes(), float(a)) for row, a in zip(batch.rows, batch.advantage_B, strict=True))
    for of_ranks in zip(*found, strict=True):
        parts = [arm.share.batch for arm in of_ranks]
        trained = [(row.tobytes(), float(a)) for b in parts for row, a in zip(b.rows, b.advantage_B, strict=True)]
        assert sorted(trained) == expected
        assert of_ranks[0].share.imbalance >= 1 and len({arm.share.imbalance for arm in of_ranks}) == 1
        # Only trees merge; a rank that has one row of a group merges nothing.
        merged, flat = sum(b.forest().num_unique for b in parts), sum(map(len, batch.rows))
        assert merged < flat if of_ranks[0].name == arms.TREE and world == 1 else merged <= flat
        assert of_ranks[0].name == arms.TREE or merged == flat


def test_fewer_rows_than_ranks_are_refused() -> None:
    with pytest.raises(SystemExit, match="2 rows do not give 3 ranks one each; raise --flat-tokens"):
        arms.as_verl_balances(small_batch(groups=1, rows=2, por=0.2), TINY.shape, rank=0, world=3)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (["tiny"], "--por: expected overlaps to draw"),
        (["tiny", "--por", "0.5", "--partitions", "1.5"], "--partitions: expected shares between 0 and 1"),
        (["tiny", "--por", "0.5", "--arms", "tree"], "--arms: expected verl among them"),
        (["tiny", "--por", "0.5", "--max-tokens", "0"], "--max-tokens: expected at least 1, received 0"),
    ],
)
def test_wrong_options_are_named(given_: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        whole_model.parse(given_)
    assert message in capsys.readouterr().err


def test_one_process_is_started_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def execv(program: str, words: list[str]) -> None:
        started.append(words)
        raise SystemExit

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["whole_model.py", "32b", "--gpus", "8", "--por", "0.92"])
    with pytest.raises(SystemExit):
        whole_model.main()
    (words,) = started
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert words[-5:] == [str(SCRIPT), "32b", "--gpus", "8", "--por", "0.92"][-5:] and str(SCRIPT) in words


def test_a_state_takes_sixteen_bytes_a_parameter() -> None:
    # Qwen3-32B as published has 32.8 billion parameters, Qwen3-30B-A3B 30.5 billion.
    assert random_engine.state_bytes(MODEL_SIZES["32b"]) / 16 == pytest.approx(32.8e9, rel=0.01)
    assert random_engine.state_bytes(MODEL_SIZES["qwen3-30b-a3b"]) / 16 == pytest.approx(30.5e9, rel=0.01)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> partial[random_engine.RandomWeightsEngine]:
    join_process_group()
    settings_ = {"flat_attention": "sdpa", "liger": False, "offload": False}
    return partial(random_engine.build_engine, TINY, tmp_path_factory.mktemp("model"), is_exact=False, **settings_)


def test_the_gate_refuses_a_wrong_arm(build: partial[random_engine.RandomWeightsEngine]) -> None:
    batch = small_batch()
    asked = {"max_tokens": 64, "stock_max_tokens": 64, "budget_shares": [0.5], "rank": 0, "world": 1}
    tree, stock, cut = arms.arms_of(batch, TINY.shape, (arms.TREE, arms.STOCK), **asked)
    assert cut.max_tokens < tree.share.batch.forest().num_unique // 2
    check = {"kind": arms.PPO, "all_rows": len(batch.rows)}
    truth = gate.exact_gradients(build, [stock], **check)
    engine = build()
    errors = gate.check_arms(engine, [tree, stock, cut], truth, **check)
    assert all(error < 1e-5 for error in errors.values()) and errors[arms.STOCK] < 1e-7
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    other = arms.Arm(
        name=arms.TREE, share=arms.balanced(small_batch(seed=1), TINY.shape, rank=0, world=1), max_tokens=64
    )
    with pytest.raises(GateError, match="gradient of tree: expected a relative error"):
        gate.check_arms(engine, [other, stock], truth, **check)


def test_weights_are_the_same_each_time_and_differ_between_parameters(
    build: partial[random_engine.RandomWeightsEngine],
) -> None:
    first, second = ([p.full_tensor() for p in build().module.parameters()] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    matrices = [one for one in first if one.ndim > 1]
    assert all(one.std().item() == pytest.approx(random_engine.STD, rel=0.1) for one in matrices)
    assert not torch.equal(matrices[1].flatten()[:64], matrices[2].flatten()[:64])
    assert all(torch.equal(one, torch.ones_like(one)) for one in first if one.ndim == 1)


def test_adamw_in_one_kernel_moves_the_weights_as_verls_does(
    build: partial[random_engine.RandomWeightsEngine],
) -> None:
    batch, moved = small_batch(), []
    share = arms.balanced(batch, TINY.shape, rank=0, world=1)
    for fused in (False, True):
        engine = build(learning_rate=1e-3, fused_adamw=fused)
        assert bool(engine.optimizer.param_groups[0].get("fused")) == fused
        before = [p.full_tensor().clone() for p in engine.module.parameters()]
        arms.run_step(engine, arms.Arm(name=arms.TREE, share=share, max_tokens=512), arms.PPO, all_rows=len(batch.rows))
        moved.append([p.full_tensor() - was for p, was in zip(engine.module.parameters(), before, strict=True)])
    assert any(move.abs().max() > 5e-4 for move in moved[0])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_losses_of_trees_and_rows_follow_each_other(build: partial[random_engine.RandomWeightsEngine]) -> None:
    from whole_models import curves

    batches = [small_batch(seed=seed) for seed in range(3)]
    faster = partial(build, learning_rate=1e-3)
    rows = curves.loss_curves(faster, batches, TINY.shape, steps=3, max_tokens=64, rank=0, world=1)
    losses = np.array([[row[f"loss_{name}"] for name in ("tree", "packed", "reordered")] for row in rows])
    assert np.allclose(losses, losses[:, :1], rtol=1e-6)
    # The control sees the same rows and weights that move.
    assert len(set(losses[:, 0])) == 3 and abs(losses[0, 0] - np.log(TINY.shape.vocab)) < 0.1


@pytest.mark.slow
def test_two_ranks_measure_a_model_with_experts(tmp_path: Path) -> None:
    out = tmp_path / "whole_model.csv"
    sizes = ["--num-rows", "4", "--row-tokens", "64", "--flat-tokens", "256", "--max-tokens", "512", "--repeats", "1"]
    chosen = ["tiny-a3b", "--gpus", "2", "--por", "0.6", "0.3", "--partitions", "0.5", *sizes]
    all_arms = ["--arms", "tree", "tree_on_policy", "packed", "verl"]
    files = ["--out", str(out), "--scratch", str(tmp_path), "--commit", "abc"]
    printed = run_ranks("whole_model.py", 2, *chosen, *all_arms, *files)
    assert "partitioned_0.5" in printed
    with out.open(newline="") as file:
        row, second = csv.DictReader(file)
    assert float(row["por"]) > float(second["por"]) and out.with_suffix(".png").stat().st_size > 10_000
    for name in ("tree", "tree_on_policy", "packed", "verl", "partitioned_0.5"):
        assert float(row[f"{name}_gradient_error"]) < 1e-5
        assert float(row[f"{name}_s"]) > 0 and float(row[f"{name}_imbalance"]) >= 1
    assert float(row["tree_on_policy_old_log_probs_s"]) == 0 < float(row["tree_old_log_probs_s"])
    assert float(row["flop_bound"]) > 1.5 and row["gpus"] == "2" and row["commit"] == "abc"
    for rival in ("packed", "verl"):
        ratio = float(row[f"{rival}_s"]) / float(row["tree_s"])
        assert float(row[f"tree_over_{rival}"]) == pytest.approx(ratio, rel=1e-4)
