"""The trainer without Ray: a queue of rows in this process, rows of sessions in it, and a worker as verl builds it."""

import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.padding_utils as padding_utils

# verl's trainer loads the plugin, and with it the modules below.
import verl.trainer.ppo.v1.trainer_base as trainer_base
from engine_harness import FLOAT32, join_process_group, model_config, nested
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from toy_qwen import under
from transfer_queue import KVBatchMeta
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import FSDPOptimizerConfig, TrainingWorkerConfig
from verl_losses import actor_loss, critic_loss

from tree_rl.cost.balance import batch as balance
from tree_rl.cost.cost_model import ModelShape
from tree_rl.verl_plugin.options import TreeConfig, TreeFSDPEngineConfig
from tree_rl.verl_plugin.trainer import queue_rows, tree_trainer
from tree_rl.verl_plugin.trainer.adapter_check import AdapterCheck
from tree_rl.verl_plugin.trainer.queue_rows import ENGINE_OBJECTS
from tree_rl.verl_plugin.trainer.trainers import PPOTrainerTreeSync
from tree_rl.verl_plugin.trainer.workers import TreeActorRolloutRefWorker, TreeTrainingWorker

SHAPE = ModelShape(hidden=8, layers=2, intermediate=16, heads=4, kv_heads=2, head_dim=3, vocab=50)


class LocalQueue:
    """The calls of the transfer queue that the trainer makes, without the Ray actors that verl keeps rows in."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: TensorDict | None = None, tags: list[dict] | None = None
    ) -> KVBatchMeta:
        for index, key in enumerate(keys):
            row = self.rows.setdefault(key, {})
            if fields is not None:
                row.update({name: _entry(column, index) for name, column in fields.items()})
            if tags is not None:
                self.tags.setdefault(key, {}).update(tags[index])
        return KVBatchMeta(keys=keys, tags=[self.tags[key] for key in keys], partition_id=partition_id)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        # Another thread may be writing a column.
        names = [name for name in select_fields or [*self.rows[keys[0]]] if all(name in self.rows[key] for key in keys)]
        data = list_of_dict_to_tensordict([{name: self.rows[key][name] for name in names} for key in keys])
        for name, column in data.items():
            # verl's own never stacks rows of one length.
            if isinstance(column, torch.Tensor) and not column.is_nested and column.dim() > 1:
                data[name] = nested(list(column.unbind()))
        return data


def _entry(column: Any, index: int) -> Any:
    if isinstance(column, torch.Tensor):
        return column.unbind()[index] if column.is_nested else column[index]
    return column[index].data if hasattr(column[index], "data") else column[index]


def local_queue(monkeypatch: pytest.MonkeyPatch) -> LocalQueue:
    """Also shortens the search for a layout: any layout serves the columns that follow it."""
    monkeypatch.setattr(balance, "MOST_TRIALS", 300)
    local = LocalQueue()
    for module in (tree_trainer, queue_rows, padding_utils, trainer_base):
        monkeypatch.setattr(module, "tq", local)
    return local


def put_rows(queue: LocalQueue, branches: list[list[int]], seed: int = 0) -> KVBatchMeta:
    """Prompt u has len(branches[u]) sessions; session s has branches[u][s] rows that share a prefix."""
    generator = np.random.default_rng(seed)
    keys, rows, tags = [], [], []
    for prompt, sessions in enumerate(branches):
        prompt_ids = generator.integers(3, 90, 6).tolist()
        for session, count in enumerate(sessions):
            stem = generator.integers(3, 90, 4).tolist()
            reward = float(generator.normal())
            for branch in range(count):
                response = stem + generator.integers(3, 90, 2 + prompt).tolist()
                mask = torch.tensor([1] * 4 + [0] + [1] * (len(response) - 5))
                scores = torch.zeros(len(response))
                scores[-1] = reward
                keys.append(f"uid-{prompt}_{session}_{branch}")
                texts = {"input_ids": prompt_ids + response, "prompts": prompt_ids, "responses": response}
                log_probs = ("rollout_log_probs", "old_log_probs", "ref_log_prob")
                rows.append(
                    {
                        "uid": f"uid-{prompt}",
                        **{name: torch.tensor(ids) for name, ids in texts.items()},
                        "position_ids": torch.arange(6 + len(response)),
                        **dict.fromkeys(("response_mask", "loss_mask"), mask),
                        "rm_scores": scores,
                        **{name: -torch.rand(len(response)) for name in log_probs},
                        "values": torch.randn(len(response)),
                        "loss_weight": torch.rand(len(response)),
                        "extra_fields": {"reward_extra_info": {"a": reward, "b": -2 * reward}},
                    }
                )
                tags.append({"seq_len": 6 + len(response), "status": "success"})
    order = generator.permutation(len(keys))
    keys, rows, tags = ([column[i] for i in order] for column in (keys, rows, tags))
    return queue.kv_batch_put(keys, "train", fields=list_of_dict_to_tensordict(rows), tags=tags)


def make_trainer(name: str = "grpo", *, ranks: int = 2, critic: bool = False, config: Any = None, **more: Any) -> Any:
    """A trainer by its estimator, with what the batch's path reads, perhaps `config`, and no workers."""
    trainer = PPOTrainerTreeSync.__new__(PPOTrainerTreeSync)
    usual = {"adv_estimator": name, "gamma": 1.0, "lam": 0.95, "use_kl_in_reward": False, "kl_penalty": "kl"}
    roles = {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2}}}
    roles |= {"critic": {"ppo_mini_batch_size": 3}}
    own = {"algorithm": {**usual, "rollout_correction": None, **more}, **roles}
    trainer.config = OmegaConf.merge(own, config or {})
    trainer.model_shape = SHAPE
    trainer._adapter_check = AdapterCheck(is_open=False, is_loaded=False)
    trainer.use_critic, trainer.use_reference_policy = critic, False
    trainer.global_steps, trainer.parameter_sync_step, trainer.local_trigger_step = 5, 1, 0
    trainer.tokenizer = SimpleNamespace(eos_token_id=2)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(ranks))})
    trainer.kl_ctrl_in_reward = SimpleNamespace(value=0.1, update=lambda current_kl, n_steps: seen.append(n_steps))
    seen: list[int] = []
    trainer.kl_steps_seen = seen
    return trainer


def build_worker(
    path: Path,
    *,
    model_type: str = "tree_language_model",
    hf_model_type: str | None = None,
    learning_rate: float = 1e-2,
    tree: TreeConfig | None = None,
    model: dict[str, Any] | None = None,
    **engine: Any,
) -> Any:
    """A worker as verl's trainer builds it, in this process."""
    join_process_group()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ |= alone if torch.distributed.get_world_size() == 1 else {"LOCAL_RANK": "0"}
    engine |= {"use_torch_compile": False, "mixed_precision": FLOAT32, "max_token_len_per_gpu": 4096}
    tree = tree or TreeConfig(mode="tree", self_check=False)
    config = TrainingWorkerConfig(
        model_type=model_type,
        model_config=model_config(path, hf_model_type or model_type, **(model or {})),
        engine_config=TreeFSDPEngineConfig(use_dynamic_bsz=True, tree=tree, **engine),
        optimizer_config=FSDPOptimizerConfig(lr=learning_rate, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TreeTrainingWorker(config)
    worker.reset()
    actor = actor_loss("vanilla", "token-mean", kl=False, entropy_coeff=0)
    worker.set_loss_fn(critic_loss() if "value" in model_type else actor)
    return worker


class OneWorker:
    """verl's worker in this process, reached through the queue as verl's dispatch reaches it; counts forwards."""

    world_size = 1

    def __init__(self, path: Path, rows: LocalQueue, **model: Any) -> None:
        self._dispatch_info = {"actor": [0], "ref": [0]}
        self._queue = rows
        self._worker = TreeActorRolloutRefWorker.__new__(TreeActorRolloutRefWorker)
        self._worker.enable_routing_replay = False
        self._worker.actor = self._worker.ref = build_worker(path, model=model, infer_max_token_len_per_gpu=4096)
        self.forwards = 0
        self._worker.actor.engine.module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def _rows(self, batch: Any) -> Any:
        data = self._queue.kv_batch_get(batch.keys, batch.partition_id, batch.fields)
        objects = {name for name, column in data.items() if not isinstance(column, torch.Tensor)}
        assert objects <= set(ENGINE_OBJECTS), "each takes time for every row"
        tu.assign_non_tensor(data, **batch.extra_info)
        return data

    def compute_log_prob(self, batch: Any) -> Any:
        return self._put(batch, self._worker.compute_log_prob(self._rows(batch)))

    def compute_ref_log_prob(self, batch: Any) -> Any:
        return self._put(batch, self._worker.compute_ref_log_prob(self._rows(batch)))

    def _put(self, batch: Any, found: Any) -> Any:
        columns = found.select(*(name for name, value in found.items() if isinstance(value, torch.Tensor)))
        self._queue.kv_batch_put(batch.keys, batch.partition_id, columns)
        return batch

    def update_actor(self, batch: Any) -> Any:
        return self._worker.update_actor(self._rows(batch))


def trainer_config(loss_agg_mode: str, correction: Any) -> DictConfig:
    """What verl's steps read beside the sizes of `make_trainer`."""
    actor = {"ppo_mini_batch_size": 6, "ppo_epochs": 1, "calculate_entropy": False, "entropy_coeff": 0.0}
    actor |= {"data_loader_seed": 1, "shuffle": True, "loss_agg_mode": loss_agg_mode, "loss_scale_factor": None}
    roles = {"actor_rollout_ref": {"actor": actor, "rollout": {"temperature": 0.9, "calculate_log_probs": True}}}
    others = {"trainer": {"critic_warmup": 0}, "algorithm": {"rollout_correction": correction}}
    return OmegaConf.create(roles | others)


SEPARATE = [
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    "trainer.v1.separate_async.parameter_sync_step=2",
    *under("actor_rollout_ref.rollout", "nnodes=1", "n_gpus_per_node=1", "checkpoint_engine.backend=gloo"),
]


@cache
def stock_config() -> DictConfig:
    """verl's whole config; overrides may add keys."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"])
    OmegaConf.set_struct(config, False)
    return config


def config_of_mode(mode: str, *overrides: str) -> DictConfig:
    given = [f"trainer.v1.trainer_mode={mode}", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    given += [*(SEPARATE if mode == "tree_separate_async" else []), *overrides]
    return OmegaConf.merge(stock_config(), OmegaConf.from_dotlist(given))


BRANCHES = [[1, 3], [2, 1], [1, 1], [4, 1], [1, 2], [1, 1]]
