"""The router auxiliary loss of all rows, where it is asked for, beside what stock verl trains on rows alone."""

from pathlib import Path

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model
from equivalence import FLAGS, LOSS, actor_loss, alone, assert_equal_gradients, infer, run
from hostile_rows import SHAPES
from tiny_families import COEF, CONFIGS, auxiliary_gradients

from tree_rl.verl_plugin.options import TreeConfig


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), CONFIGS["qwen3_moe"])


def test_auxiliary_loss_over_all_rows(path: Path) -> None:
    rows = SHAPES["two_groups"]
    stock = alone(build_engine(path, tree=None), rows)
    value, auxiliary = auxiliary_gradients(path, rows)
    options = TreeConfig(max_tokens=5, router_aux_loss_coef=COEF)
    tree = build_engine(path, tree=options, model={"enable_gradient_checkpointing": True})
    got = run(tree, ppo_batch(rows, **FLAGS), LOSS)
    assert sum(got["loss"]) == pytest.approx(sum(stock["loss"]), rel=1e-4, abs=1e-6)
    expected = {key: gradient + COEF * auxiliary[key] for key, gradient in stock["gradients"].items()}
    assert_equal_gradients(expected, got["gradients"])
    metrics = got["metrics"]
    assert metrics["moe/aux_loss"].aggregate() == pytest.approx(value, rel=1e-5)
    assert metrics["moe/counted_anew"].aggregate() == 1
    # A loss that couples log-probs computes all of them before the first backward.
    coupled = run(tree, ppo_batch(rows, **FLAGS), actor_loss("geo_mean", "token-mean"))
    assert coupled["metrics"]["moe/aux_loss"].aggregate() == pytest.approx(value, rel=1e-5)


def test_load_is_remembered_until_the_weights_move(path: Path) -> None:
    engine = build_engine(path, tree=TreeConfig(max_tokens=20, router_aux_loss_coef=COEF))
    forwards: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: forwards.append(1))

    def update(name: str) -> tuple[float, int, dict[str, torch.Tensor]]:
        forwards.clear()
        got = run(engine, ppo_batch(SHAPES[name], **FLAGS), LOSS)
        return got["metrics"]["moe/counted_anew"].aggregate(), len(forwards), got["gradients"]

    anew, more_forwards, expected = update("two_groups")
    assert anew == 1
    infer(engine, ppo_batch(SHAPES["two_groups"], **FLAGS))
    anew, fewer_forwards, got = update("two_groups")
    assert anew == 0 and fewer_forwards < more_forwards
    assert_equal_gradients(expected, got)
    assert update("comb")[0] == 1
    infer(engine, ppo_batch(SHAPES["two_groups"], **FLAGS))
    engine.optimizer_step()
    assert update("two_groups")[0] == 1


def test_a_coefficient_of_zero_only_counts(path: Path) -> None:
    runs = [
        run(build_engine(path, tree=tree), ppo_batch(SHAPES["comb"], **FLAGS), LOSS)
        for tree in (TreeConfig(mode="tree"), TreeConfig(router_aux_loss_coef=0.0))
    ]
    for name, gradient in runs[0]["gradients"].items():
        assert torch.equal(gradient, runs[1]["gradients"][name]), name
    metrics = runs[1]["metrics"]
    assert "moe/aux_loss" not in metrics and "moe/load_max_over_mean" not in runs[0]["metrics"]
    assert metrics["moe/load_max_over_mean"].aggregate() > 1 > metrics["moe/load_min_over_mean"].aggregate()
