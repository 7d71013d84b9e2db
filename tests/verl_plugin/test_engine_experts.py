"""The router auxiliary loss of all rows, where it is asked for, beside what stock verl trains on rows alone."""

from pathlib import Path

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model
from equivalence import FLAGS, LOSS, alone, assert_equal_gradients, run
from hostile_rows import SHAPES
from tiny_families import ATTENTION, COEF, CONFIGS, auxiliary_gradients

from tree_rl.verl_plugin.options import TreeConfig


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(tmp_path_factory.mktemp(name), config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize(
    "family, name, capacity, checkpointing",
    (
        ("qwen3_moe", "two_groups", 5, True),
        ("gpt_oss", "comb", 1000, False),
        pytest.param("qwen3_5_moe", "branches", 5, True, marks=pytest.mark.slow),
    ),
)
def test_auxiliary_loss_over_all_rows(
    paths: dict[str, Path], family: str, name: str, capacity: int, checkpointing: bool
) -> None:
    path, attention = paths[family], ATTENTION[family]
    stock = alone(build_engine(path, tree=None, attention=attention), SHAPES[name])
    value, auxiliary = auxiliary_gradients(path, SHAPES[name])
    tree = build_engine(
        path,
        tree=TreeConfig(max_tokens=capacity, router_aux_loss_coef=COEF),
        attention=attention,
        model={"enable_gradient_checkpointing": checkpointing},
    )
    got = run(tree, ppo_batch(SHAPES[name], **FLAGS), LOSS)
    assert sum(got["loss"]) == pytest.approx(sum(stock["loss"]), rel=1e-4, abs=1e-6)
    expected = {key: gradient + COEF * auxiliary[key] for key, gradient in stock["gradients"].items()}
    assert_equal_gradients(expected, got["gradients"])
    metrics = got["metrics"]
    assert metrics["moe/aux_loss"].aggregate() == pytest.approx(value, rel=1e-5)
    assert metrics["moe/counted_anew"].aggregate() == 1


def test_load_is_remembered_until_the_weights_move(paths: dict[str, Path]) -> None:
    engine = build_engine(paths["qwen3_moe"], tree=TreeConfig(max_tokens=20, router_aux_loss_coef=COEF))
    forwards: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: forwards.append(1))

    def update(name: str) -> tuple[float, int, dict[str, torch.Tensor]]:
        forwards.clear()
        got = run(engine, ppo_batch(SHAPES[name], **FLAGS), LOSS)
        return got["metrics"]["moe/counted_anew"].aggregate(), len(forwards), got["gradients"]

    anew, more_forwards, expected = update("two_groups")
    assert anew == 1
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["two_groups"], **FLAGS))
    anew, fewer_forwards, got = update("two_groups")
    assert anew == 0 and fewer_forwards < more_forwards
    assert_equal_gradients(expected, got)
    assert update("comb")[0] == 1
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["two_groups"], **FLAGS))
    engine.optimizer_step()
    assert update("two_groups")[0] == 1


def test_a_coefficient_of_zero_only_counts(paths: dict[str, Path]) -> None:
    runs = [
        run(build_engine(paths["mixtral"], tree=tree), ppo_batch(SHAPES["comb"], **FLAGS), LOSS)
        for tree in (TreeConfig(mode="tree"), TreeConfig(router_aux_loss_coef=0.0))
    ]
    for name, gradient in runs[0]["gradients"].items():
        assert torch.equal(gradient, runs[1]["gradients"][name]), name
    metrics = runs[1]["metrics"]
    assert "moe/aux_loss" not in metrics and "moe/load_max_over_mean" not in runs[0]["metrics"]
    assert metrics["moe/load_max_over_mean"].aggregate() > 1 > metrics["moe/load_min_over_mean"].aggregate()
