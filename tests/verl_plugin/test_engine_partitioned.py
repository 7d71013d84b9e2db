"""An engine that cuts trees previews log-probs only where a loss needs them and no inference has found them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_harness import build_engine, ppo_batch
from equivalence import FLAGS, POLICY_LOSSES, actor_loss, alone, assert_trains_as, run, without_pass
from hostile_rows import SHAPES

from tree_rl.verl_plugin.engine.verl_loss import SEPARABLE_POLICY_LOSSES, is_token_separable
from tree_rl.verl_plugin.options import TreeConfig


@pytest.fixture(scope="module")
def tree(model_path: Path) -> Any:
    return build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=7, self_check=False))


def ops_of_one_update(engine: Any, loss: Any, monkeypatch: pytest.MonkeyPatch, data: Any = None) -> str:
    """The ops of an update, of "branches" or of a batch, as the engine agreed on them."""
    from tree_rl.training import run as engine_module

    seen: list[str] = []
    original = engine_module.run_in_step

    def recording(schedule: str, *args: Any) -> int:
        seen.append(schedule)
        return original(schedule, *args)

    monkeypatch.setattr(engine_module, "run_in_step", recording)
    run(engine, ppo_batch(SHAPES["branches"], **FLAGS) if data is None else data, loss)
    return seen[0]


@pytest.mark.parametrize("loss_mode, extra_passes", (("vanilla", 0), ("gspo", 1)))
def test_only_sequence_coupled_losses_off_policy_pay_an_extra_pass(
    tree: Any, loss_mode: str, extra_passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tree
    engine.forget()
    ops = ops_of_one_update(engine, actor_loss(loss_mode, "token-mean"), monkeypatch)
    assert ops.count("F") == (1 + extra_passes) * ops.count("B")


@pytest.mark.parametrize(("loss_mode", "previews"), [("vanilla", 0), ("gspo", 0), ("clip_cov", 1)])
def test_reused_log_probs_are_previewed_for_losses_that_couple_more_than_ratios(
    tree: Any, loss_mode: str, previews: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.forget()
    ops = ops_of_one_update(
        tree, actor_loss(loss_mode, "token-mean"), monkeypatch, without_pass(SHAPES["branches"], **FLAGS)
    )
    assert ops.count("F") == (1 + previews) * ops.count("B")


def test_on_policy_updates_reuse_the_log_probs_of_the_inference(
    stock: Any, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loss = tree, actor_loss("gspo", "seq-mean-token-mean")
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["branches"], calculate_entropy=True))
    ops = ops_of_one_update(engine, loss, monkeypatch)
    assert ops.count("F") == ops.count("B")
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["branches"], calculate_entropy=True))
    assert_trains_as(alone(stock, SHAPES["branches"], loss), engine, SHAPES["branches"], loss)


def test_log_probs_of_other_weights_or_of_an_earlier_inference_are_not_reused(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, loss = (
        build_engine(model_path, tree=TreeConfig(mode="tree", max_tokens=7)),
        actor_loss("gspo", "token-mean"),
    )
    with engine.eval_mode(disable_auto_offload=True):
        for name in ("branches", "comb"):
            engine.infer_batch(ppo_batch(SHAPES[name], calculate_entropy=True))
    ops = ops_of_one_update(engine, loss, monkeypatch)
    assert ops.count("F") == 2 * ops.count("B")
    with engine.eval_mode(disable_auto_offload=True):
        engine.infer_batch(ppo_batch(SHAPES["branches"], calculate_entropy=True))
    with engine.train_mode(disable_auto_offload=True):
        engine.train_batch(ppo_batch(SHAPES["branches"], **FLAGS), loss)
    ops = ops_of_one_update(engine, loss, monkeypatch)
    assert ops.count("F") == 2 * ops.count("B")


@pytest.mark.parametrize("loss_mode", POLICY_LOSSES)
def test_known_losses_are_classified(loss_mode: str) -> None:
    assert is_token_separable(actor_loss(loss_mode, "token-mean")) == (loss_mode in SEPARABLE_POLICY_LOSSES)


def test_an_unknown_loss_is_taken_for_coupled() -> None:
    assert not is_token_separable(lambda **_: None)
    assert not is_token_separable(partial(max, 1))
