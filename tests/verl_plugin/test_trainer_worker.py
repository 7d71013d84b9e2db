"""A worker's mini-batches hold whole groups."""

from pathlib import Path
from typing import Any

import torch
from engine_harness import Row, ppo_batch, save_model, tiny_qwen3
from local_trainer import build_worker
from verl.utils import tensordict_utils as tu

from tree_rl.verl_plugin.trainer.workers import shuffled_rows

ROWS = [
    Row(tokens=[first, 5, 6, 7, 10 + branch, 11, 12], prompt=2, mask=[0, 1, 1, 0, 1], advantage=branch - 0.5, uid=uid)
    for uid, first in (("a", 3), ("b", 4))
    for branch in range(2)
]


def grad_norms(path: Path, **flags: Any) -> list[float]:
    """Of the optimizer steps of a batch."""
    output = build_worker(path).train_mini_batch(ppo_batch(ROWS, **{"global_batch_size": 2, **flags}))
    return tu.get(output, "metrics")["grad_norm"]


def test_our_key_counts_mini_batches_and_without_it_they_are_verls(model_path: Path) -> None:
    assert len(grad_norms(model_path, mini_batch_size=1, epochs=1, global_batch_size=1)) == 4
    # verl's own count of rows travels along and must lose.
    assert len(grad_norms(model_path, num_mini_batch=2, mini_batch_size=1, epochs=1)) == 2


def test_shuffling_moves_whole_mini_batches() -> None:
    order = shuffled_rows(12, 3, 5, seed=7).reshape(5, 3, 4)
    for epoch in order:
        assert sorted(epoch[:, 0].tolist()) == [0, 4, 8]
        assert (epoch - epoch[:, :1]).tolist() == [[0, 1, 2, 3]] * 3
    assert len({tuple(epoch[:, 0].tolist()) for epoch in order}) > 1
    assert torch.equal(shuffled_rows(12, 3, 5, seed=7).reshape(5, 3, 4), order)


def test_shuffle_trains_every_mini_batch_once_per_epoch(model_path: Path) -> None:
    assert len(grad_norms(model_path, num_mini_batch=2, epochs=3, dataloader_kwargs={"shuffle": True}, seed=3)) == 6


def test_critic_model_type_chooses_the_tree_critic(tmp_path: Path) -> None:
    path = save_model(tmp_path, tiny_qwen3(), value=True)
    tree = build_worker(path, model_type="value_model", hf_model_type="tree_value_model")
    assert type(tree.engine).__name__ == "TreeFSDPEngineWithValueHead"
    output = tree.train_mini_batch(ppo_batch(ROWS, num_mini_batch=1, epochs=1))
    assert tu.get(output, "metrics")["loss"][0] > 0
