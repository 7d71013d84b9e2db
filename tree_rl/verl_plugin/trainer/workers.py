"""verl's workers for a tree run, in which mini-batches keep groups whole."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.config import TrainingWorkerConfig

from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.engine import TreeFSDPEngineWithLMHead
from tree_rl.verl_plugin.engine.rows_in import PATH_WEIGHT_SCALE
from tree_rl.verl_plugin.engine.verl_loss import HOLDS_CELLS, averages_sequences
from tree_rl.verl_plugin.options import TREE_VALUE_MODEL
from tree_rl.verl_plugin.resume.rank_files import CheckpointFilesWorker
from tree_rl.verl_plugin.trainer.rows_of_step import assign_rows_of_step

OF_UPDATE = "log_probs_of_update"
"""Flag of a request for the log-probs of the last update, for which no forward runs."""

WITHOUT_ADAPTER = "no_lora_adapter"
"""verl's flag of a pass for the reference policy inside the actor."""

ShardedState = tuple[dict[str, tuple[torch.Tensor, Any]], Any]


class TreeTrainingWorker(CheckpointFilesWorker, compat.TrainingWorker):
    """verl's training worker, with mini-batches of whole cells instead of shuffled rows."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        # verl's trainer hard-codes the critic's model type; here `critic.model.model_type` chooses it.
        if config.model_type == "value_model" and config.model_config.get("model_type") == TREE_VALUE_MODEL:
            config = dataclasses.replace(config, model_type=TREE_VALUE_MODEL)
        super().__init__(config)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """Train on `num_mini_batch` equal runs of rows; without that key as verl does.

        `data` contains this rank's rows, cell after cell. `shuffle` reorders whole mini-batches in every epoch, in the
        same order on all ranks. Losses that average over sequences divide by the number of rows of their mini-batch on
        all ranks, not by `global_batch_size`.
        """
        num_mini_batch = tu.get_non_tensor_data(data=data, key="num_mini_batch", default=None)
        if num_mini_batch is None:
            return super().train_mini_batch(data)
        tu.pop(data, key="mini_batch_size", default=None)
        tu.assign_non_tensor(data, **{HOLDS_CELLS: True})
        loader = tu.pop(data, key="dataloader_kwargs", default={})
        if loader.get("shuffle", False):
            epochs = tu.pop(data, key="epochs", default=1)
            seed = tu.get_non_tensor_data(data=data, key="seed", default=42)
            order = shuffled_rows(len(data), num_mini_batch, epochs, seed)
            data = tu.index_select_tensor_dict(data, order)
            tu.assign_non_tensor(data, num_mini_batch=num_mini_batch * epochs, epochs=1)
        return super().train_mini_batch(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_batch(self, data: TensorDict) -> TensorDict:
        """Run verl's optimizer step; first sets the number of rows of a mini-batch of cells."""
        if tu.get(data, key=HOLDS_CELLS, default=False):
            engine = self.engine
            runs_trees = isinstance(engine, TreeFSDPEngineWithLMHead) and engine.tree_config.mode != "flat"
            weighting = engine.tree_config.path_weighting if runs_trees else "verl"
            assign_rows_of_step(data, path_weighting=weighting, group=engine.get_data_parallel_group())
            if not averages_sequences(self.loss_fn):
                tu.pop(data, key=PATH_WEIGHT_SCALE, default=None)
        return super().train_batch(data)


def ranks_with_rows(workers: Any, role: str) -> int:
    """Number of a role's ranks with different rows; ranks that share a forest's tokens count as one.

    `role` is the name of a mesh of verl's worker group `workers`, such as `actor`.
    """
    if role not in workers._dispatch_info:
        workers._dispatch_info[role] = workers._query_dispatch_info(role)
    return int(max(workers._dispatch_info[role])) + 1


def shuffled_rows(num_rows: int, num_mini_batch: int, epochs: int, seed: int) -> torch.Tensor:
    """Order of rows, int64 [epochs * num_rows], with a new order of the mini-batches in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    mini_batches = torch.arange(num_rows).reshape(num_mini_batch, -1)
    return torch.cat(
        [mini_batches[torch.randperm(num_mini_batch, generator=generator)] for _ in range(epochs)]
    ).flatten()


class TreeActorRolloutRefWorker(CheckpointFilesWorker, compat.ActorRolloutRefWorker):
    """verl's hybrid worker, with tree training workers as actor and reference policy."""

    actor_worker_cls = TreeTrainingWorker
    ref_worker_cls = TreeTrainingWorker

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict | None:
        """verl's log-probs and entropies; with `log_probs_of_update`, those of the last update for the same rows.

        Without adapter, `ref_log_prob` as in `compute_ref_log_prob`.
        """
        if tu.get(data, key=WITHOUT_ADAPTER, default=False):
            return _of_reference(super().compute_log_prob(data), data)
        if not tu.pop(data, key=OF_UPDATE, default=False):
            return super().compute_log_prob(data)
        found = self.actor.engine.take_outputs_of_update()
        if not self.actor.engine.is_mp_src_rank_with_outputs():
            return None  # as verl's passes; another rank returns the same rows
        return tu.get_tensordict(tensor_dict=found, non_tensor_dict={"metrics": {}})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | None:
        """The column `ref_log_prob`, nested [B, T], which verl's trainer cuts from the log-probs of whole rows."""
        return _of_reference(super().compute_ref_log_prob(data), data)


def _of_reference(output: TensorDict | None, data: TensorDict) -> TensorDict | None:
    """A pass's output with `ref_log_prob` in place of `log_probs`, which ranks without rows or output lack."""
    if output is not None and "log_probs" in output:
        output["ref_log_prob"] = compat.response_from_nested(output.pop("log_probs"), data["response_mask"])
    return output


class TreeDetachActorWorker(TreeActorRolloutRefWorker, compat.DetachActorWorker):
    """The worker of `tree_separate_async`, which can compute old log-probs with the weights of an earlier update."""

    @property
    def copy_handler(self) -> Callable[[torch.nn.Module], ShardedState]:
        """verl's copy of the weights; also copies weights in host memory, which verl would return uncopied."""
        verls_copy = super().copy_handler

        def copy(module: torch.nn.Module) -> ShardedState:
            shards, spec = verls_copy(module)
            on_host = {name for name, weight in module.named_parameters() if weight.device.type == "cpu"}
            for name in on_host & shards.keys():
                shard, placement = shards[name]
                shards[name] = shard.clone(), placement
            return shards, spec

        return copy

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_model_from_cpu(self, n: int) -> None:
        """Restore the weights of `save_model_to_cpu(n)`, and drop the log-probs of other weights."""
        super().restore_model_from_cpu(n)
        if isinstance(self.actor.engine, TreeFSDPEngineWithLMHead):
            self.actor.engine.forget()
