"""A trainer's checkpoints without Ray: verl's own saving and loading, real engines, one rank of actor and of critic."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback

# verl's trainer loads the plugin, and with it the module below.
from verl.trainer.ppo.v1.trainer_base import PPOTrainer  # noqa: F401

from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.resume.rank_files import CheckpointFilesWorker
from tree_rl.verl_plugin.resume.resumable_trainer import ResumableTrainer
from tree_rl.verl_plugin.resume.row_names import prompt_uid
from tree_rl.verl_plugin.resume.update_ledger import record_update

CONTENTS = ["model", "optimizer", "extra"]


class OneRank(CheckpointFilesWorker):
    """A worker group of one rank, in this process."""

    def __init__(self, engine: Any = None, rank: int = 0, world_size: int = 1) -> None:
        self.engine = engine
        self.rank = rank
        self.world_size = world_size

    def seal_checkpoint_files(self, folder: str) -> Any:
        return [super().seal_checkpoint_files(folder)]

    def find_checkpoint_damage(self, folder: str, files: Any, contents: Any) -> Any:
        return [super().find_checkpoint_damage(folder, files, contents)]

    def save_checkpoint(self, local: str, remote: str | None, step: int, max_ckpt_to_keep: int | None) -> None:
        assert max_ckpt_to_keep is None, "verl must delete no checkpoint"
        self.engine.save_checkpoint(local, remote, step, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        self.engine.load_checkpoint(local_path, None, del_local_after_load)


class Trainer(ResumableTrainer):
    """The tree trainers' checkpoints; nothing trains."""

    on_step_end = on_sample_end = lambda self: None
    trainer_mode = "sync"

    def __init__(self, root: Path, actor: Any, critic: Any, **trainer: Any) -> None:
        checkpoint = {"checkpoint": {"load_contents": CONTENTS, "async_save": False}}
        self.config = OmegaConf.create(
            {
                "trainer": {
                    "default_local_dir": str(root),
                    "default_hdfs_dir": None,
                    "del_local_ckpt_after_load": False,
                    "resume_mode": "auto",
                    **trainer,
                },
                "algorithm": {"use_kl_in_reward": True},
                "actor_rollout_ref": {"actor": checkpoint, "rollout": {}},
                "critic": checkpoint,
            }
        )
        self.actor_rollout_wg, self.critic_wg, self.use_critic = OneRank(actor), OneRank(critic), True
        self.train_dataloader = StatefulDataLoader(list(range(100)), batch_size=2)
        self.batches = iter(self.train_dataloader)
        self.kl_ctrl_in_reward = SimpleNamespace(value=0.0)
        self.checkpoint_callback = build_checkpoint_callback(self.config)

    def train(self, step: int) -> None:
        """What a step changes."""
        self.global_steps = step
        for engine in (self.actor_rollout_wg.engine, self.critic_wg.engine):
            set_weights(engine, step)
        next(self.batches)
        self.kl_ctrl_in_reward.value = step / 100
        uid = prompt_uid(step, 0)
        record_update(self._root, step, 0, {f"{uid}_0_0": np.arange(step)}, {uid: step})

    def state(self) -> tuple[Any, ...]:
        """What a resume restores, as numbers: step, weights, data, KL coefficient, ledger."""
        weights = [first_weight(wg.engine) for wg in (self.actor_rollout_wg, self.critic_wg)]
        fetched = self.train_dataloader.state_dict()["_num_yielded"]
        ledger = [json.loads(line)["step"] for line in (self._root / "updates.jsonl").read_text().splitlines()]
        return self.global_steps, weights, fetched, self.kl_ctrl_in_reward.value, ledger


def build_engines(folder: Path) -> tuple[Any, Any]:
    """An actor and a critic."""
    model = save_model(folder / "model", tiny_qwen3())
    value = save_model(folder / "value", tiny_qwen3(), value=True)
    tree = TreeConfig(mode="tree")
    actor, critic = build_engine(model, tree=tree), build_engine(value, tree=tree, value=True)
    for engine in (actor, critic):
        # Adam has state after a step alone.
        for weight in engine.module.parameters():
            weight.grad = torch.zeros_like(weight)
        engine.optimizer.step()
    return actor, critic


def set_weights(engine: Any, value: float) -> None:
    with torch.no_grad():
        for weight in engine.module.parameters():
            weight.fill_(value)


def first_weight(engine: Any) -> float:
    """The value of all weights; NaN where they differ."""
    values = {float(value) for weight in engine.module.parameters() for value in weight.to_local().detach().unique()}
    return values.pop() if len(values) == 1 else float("nan")
