"""Log-probs found with other weights, put aside in a step or without the adapter, never pass for the trained ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import actor_loss, assert_equal_gradients, infer, run
from hostile_rows import shapes
from local_trainer import build_worker
from omegaconf import OmegaConf

from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.trainer.workers import TreeDetachActorWorker

ROWS = shapes()["branches"]
# Coupled over a row's tokens: in partitions it needs all log-probs before the first backward.
LOSS = actor_loss("gspo", "token-mean")


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    """verl's worker around a real actor, without the Ray processes that would call it; its trees run in partitions."""
    detached = TreeDetachActorWorker.__new__(TreeDetachActorWorker)
    detached.actor = build_worker(save_model(tmp_path, tiny_qwen3()))
    detached.config = OmegaConf.create({"actor": {"strategy": "fsdp2"}})
    detached._strategy_handlers = None
    return detached


def log_probs(engine: Any) -> torch.Tensor:
    return infer(engine, ppo_batch(ROWS, max_tokens=7))["log_probs"].values()


def update(engine: Any) -> None:
    with engine.train_mode(disable_auto_offload=True):
        engine.train_batch(ppo_batch(ROWS, max_tokens=7), LOSS)


def test_an_update_does_not_take_old_log_probs_of_other_weights_for_its_own(worker: Any) -> None:
    engine = worker.actor.engine
    worker.save_model_to_cpu(0)
    update(engine)
    # The second update of a step, as verl's trainer runs it: old log-probs with the step's first weights.
    worker.save_model_to_cpu(1)
    worker.restore_model_from_cpu(0)
    old = log_probs(engine)
    worker.restore_model_from_cpu(1)
    worker.clear_cpu_model(1)
    got = run(engine, ppo_batch(ROWS, max_tokens=7), LOSS)
    assert got["metrics"]["tree/partitions"].aggregate() > 1
    engine.forget()
    expected = run(engine, ppo_batch(ROWS, max_tokens=7), LOSS)
    assert_equal_gradients(expected["gradients"], got["gradients"])
    assert (log_probs(engine) - old).abs().max() > 1e-2


def test_an_update_does_not_take_the_log_probs_without_adapter_for_its_own(tmp_path: Path) -> None:
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    engine = build_engine(
        save_model(tmp_path, tiny_qwen3()), tree=TreeConfig(mode="tree", max_tokens=7, self_check=False), model=lora
    )
    for _ in range(3):  # the first step moves only one of an adapter's two matrices
        update(engine)
    with engine.disable_adapter():
        without = log_probs(engine)
    got = run(engine, ppo_batch(ROWS), LOSS)
    engine.forget()
    expected = run(engine, ppo_batch(ROWS), LOSS)
    assert_equal_gradients(expected["gradients"], got["gradients"])
    assert (log_probs(engine) - without).abs().max() > 1e-3
