"""`reuse_log_probs`: an update that finds its old log-probs itself trains as the one that a pass has found them for.

Partitions preview log-probs only where a loss needs them and no inference has found them.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_harness import BFLOAT16, FLAGS, LORA, build_engine, ppo_batch
from equivalence import LOSS, alone, assert_equal_runs, assert_trains_as, infer, run, wanted_positions
from hostile_rows import SHAPES, row, tokens
from local_trainer import build_worker
from omegaconf import OmegaConf
from rank_engines import empty_batch
from rank_processes import run_ranks
from reused_log_probs import run_after_pass, without_pass
from verl.utils import tensordict_utils as tu
from verl_losses import AGG_MODES, POLICY_LOSSES, actor_loss

from tree_rl.training.run import Runner
from tree_rl.verl_plugin.engine.verl_loss import REUSE_LOG_PROBS
from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError
from tree_rl.verl_plugin.trainer.workers import OF_UPDATE, TreeDetachActorWorker

ROWS = SHAPES["masks_differ_on_shared_prefix"]
TREES = {
    "whole": TreeConfig(mode="tree", self_check=False),
    "partitioned": TreeConfig(mode="tree", max_tokens=7, self_check=False),
    "flat": TreeConfig(mode="flat"),
}


@pytest.fixture(scope="module")
def engines(model_path: Path) -> dict[str, Any]:
    return {name: build_engine(model_path, tree=tree) for name, tree in TREES.items()}


COMBINATIONS = [(loss_mode, AGG_MODES[at % len(AGG_MODES)]) for at, loss_mode in enumerate(POLICY_LOSSES)]


@pytest.mark.parametrize("loss_mode, agg_mode", COMBINATIONS)
def test_every_loss_trains_as_after_a_pass(engines: dict[str, Any], stock: Any, loss_mode: str, agg_mode: str) -> None:
    loss = actor_loss(loss_mode, agg_mode)
    expected = run_after_pass(stock, ROWS, loss, **FLAGS)
    for engine in engines.values():
        got = run(engine, without_pass(ROWS, **FLAGS), loss)
        assert_equal_runs(expected, got, wanted_positions(ppo_batch(ROWS)), ("log_probs", "entropy"))
        for name, metric in expected["metrics"].items():
            if hasattr(metric, "aggregate"):
                assert got["metrics"][name].aggregate() == pytest.approx(metric.aggregate(), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("mode, remove_padding", (("tree", False), ("auto", True), ("flat", False)))
def test_unread_entropies_are_those_of_the_pass(model_path: Path, stock: Any, mode: str, remove_padding: bool) -> None:
    # `auto` runs rows that share nothing without a tree, beside a tree; temperatures differ row by row.
    alone = [row(tokens(20 + at, 65), prompt=1, uid=f"alone {at}", temperature=0.8) for at in range(3)]
    rows = [*SHAPES["temperatures_differ"], *alone]
    loss = actor_loss("vanilla", "token-mean", entropy_coeff=0.0)
    engine = build_engine(model_path, tree=TreeConfig(mode=mode, self_check=mode == "auto"))
    settings = {"use_remove_padding": remove_padding}
    expected = run_after_pass(stock, rows, loss, return_model_output=True, **settings)
    got = run(engine, without_pass(rows, **settings), loss)
    wanted = wanted_positions(ppo_batch(rows))
    assert_equal_runs(expected, got, wanted, ("log_probs",))
    assert "actor/entropy_loss" not in got["metrics"]
    found, of_pass = engine.take_outputs_of_update(), infer(stock, ppo_batch(rows, calculate_entropy=True, **settings))
    for name, values in found.items():
        torch.testing.assert_close(values.values()[wanted], of_pass[name].values()[wanted], rtol=2e-5, atol=2e-5)
    if mode == "auto":
        assert got["metrics"]["tree/unique_tokens"].aggregate() < got["metrics"]["tree/flat_tokens"].aggregate()
        with patch.object(engine, "stock_step", wraps=engine.stock_step) as without_tree:
            infer(engine, ppo_batch(rows))
        assert without_tree.called
    with pytest.raises(RuntimeError, match="expected an update with reuse_log_probs=True"):
        engine.take_outputs_of_update()


def test_a_rank_without_rows_has_no_outputs(engines: dict[str, Any]) -> None:
    data = empty_batch()
    tu.assign_non_tensor(data, **{REUSE_LOG_PROBS: True})
    got = run(engines["partitioned"], data, LOSS)
    assert not any(gradient.any() for gradient in got["gradients"].values())
    assert engines["partitioned"].take_outputs_of_update() == {}


def log_probs_of_an_update(rank: int, model: Path) -> Any:
    """What a worker returns whose neighbour has the same rows, if it returns anything."""
    worker = TreeDetachActorWorker.__new__(TreeDetachActorWorker)
    worker.actor = build_worker(model, ulysses_sequence_parallel_size=2)
    run(worker.actor.engine, without_pass(ROWS, **FLAGS), LOSS)
    found = worker.compute_log_prob(ppo_batch(ROWS, **{OF_UPDATE: True}))
    return None if found is None else found["log_probs"].values()


def test_of_ranks_that_share_tokens_one_returns_log_probs(model_path: Path, stock: Any) -> None:
    first, second = run_ranks(log_probs_of_an_update, 2, model_path)
    assert second is None, "verl 0.9.1 cannot put aside what a second rank returns"
    wanted, of_pass = wanted_positions(ppo_batch(ROWS)), infer(stock, ppo_batch(ROWS))["log_probs"].values()
    torch.testing.assert_close(first[wanted], of_pass[wanted], rtol=2e-5, atol=2e-5)


def forwards_per_backward(engine: Any, loss: Any, data: Any = None) -> float:
    """Of an update of "branches", or of a batch, in partitions."""
    with patch.object(Runner, "follow", autospec=True, side_effect=Runner.follow) as followed:
        run(engine, ppo_batch(SHAPES["branches"], **FLAGS) if data is None else data, loss)
    schedule = followed.call_args_list[0].args[1].schedule
    assert schedule.count("B") > 1
    return schedule.count("F") / schedule.count("B")


@pytest.mark.parametrize("is_reused", (False, True))
@pytest.mark.parametrize("loss_mode", ("vanilla", "gspo", "clip_cov"))
def test_partitions_preview_only_for_coupled_tokens(engines: dict[str, Any], loss_mode: str, is_reused: bool) -> None:
    tree = engines["partitioned"]
    tree.forget()
    data = (without_pass if is_reused else ppo_batch)(SHAPES["branches"], **FLAGS)
    # Where ratios are one, only clip_cov still couples tokens.
    previews = loss_mode == "clip_cov" if is_reused else loss_mode != "vanilla"
    assert forwards_per_backward(tree, actor_loss(loss_mode, "token-mean"), data) == 1 + previews


def test_on_policy_updates_reuse_the_log_probs_of_the_inference(stock: Any, engines: dict[str, Any]) -> None:
    loss, tree = actor_loss("gspo", "seq-mean-token-mean"), engines["partitioned"]
    infer(tree, ppo_batch(SHAPES["branches"]))
    assert forwards_per_backward(tree, loss) == 1
    infer(tree, ppo_batch(SHAPES["branches"]))
    assert_trains_as(alone(stock, SHAPES["branches"], loss), tree, SHAPES["branches"], loss)


def test_log_probs_of_other_weights_or_of_an_earlier_inference_are_not_reused(model_path: Path) -> None:
    engine, loss = build_engine(model_path, tree=TREES["partitioned"]), actor_loss("gspo", "token-mean")
    for name in ("branches", "comb"):
        infer(engine, ppo_batch(SHAPES[name]))
    assert forwards_per_backward(engine, loss) == 2
    infer(engine, ppo_batch(SHAPES["branches"]))
    engine.optimizer_step()
    assert forwards_per_backward(engine, loss) == 2


def test_log_probs_of_weights_put_aside_or_without_the_adapter_are_not_reused(model_path: Path) -> None:
    # verl's worker around a real actor, without the Ray processes that would call it.
    worker = TreeDetachActorWorker.__new__(TreeDetachActorWorker)
    worker.config = OmegaConf.create({"actor": {"strategy": "fsdp2"}})
    worker.actor, worker._strategy_handlers = build_worker(model_path), None
    data, loss = ppo_batch(SHAPES["branches"], max_tokens=7, **FLAGS), actor_loss("gspo", "token-mean")
    # The second update of a step, as verl's trainer runs it: old log-probs with the step's first weights.
    worker.save_model_to_cpu(0)
    worker.save_model_to_cpu(1)
    worker.restore_model_from_cpu(0)
    infer(worker.actor.engine, data)
    worker.restore_model_from_cpu(1)
    assert forwards_per_backward(worker.actor.engine, loss, data) == 2
    engine = build_engine(model_path, tree=TREES["partitioned"], model=LORA)
    with engine.disable_adapter():
        infer(engine, data)
    assert forwards_per_backward(engine, loss, data) == 2


def test_an_adapter_trains_in_bf16_where_the_reference_pass_comes_first(model_path: Path) -> None:
    gradients = []
    for reference_first in (False, True):
        engine = build_engine(model_path, tree=TREES["whole"], model=LORA, engine={"mixed_precision": BFLOAT16})
        data = ppo_batch(SHAPES["branches"], **FLAGS)
        if reference_first:
            with engine.disable_adapter():
                infer(engine, data)
        gradients.append(run(engine, data, LOSS)["gradients"])
    assert all("lora_" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0)


def test_a_trainer_that_does_not_know_the_option_is_refused_where_the_option_is_true(model_path: Path) -> None:
    engine = build_engine(model_path, tree=TreeConfig(mode="tree", reuse_log_probs=True))
    with pytest.raises(UnsupportedFeatureError, match=r"tree\.reuse_log_probs=True, but the trainer .*tree_sync"):
        run(engine, ppo_batch(ROWS), LOSS)
