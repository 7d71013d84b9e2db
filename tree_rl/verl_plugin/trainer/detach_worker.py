"""The worker of `tree_separate_async`: verl puts its weights aside and back within a step, which trees must notice."""

from collections.abc import Callable
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register

from tree_rl.verl_plugin.compat import DetachActorWorker
from tree_rl.verl_plugin.engine.engine import TreeFSDPEngineWithLMHead
from tree_rl.verl_plugin.trainer.worker import TreeActorRolloutRefWorker

ShardedState = tuple[dict[str, tuple[torch.Tensor, Any]], Any]


class TreeDetachActorWorker(TreeActorRolloutRefWorker, DetachActorWorker):
    """verl's worker that can compute old log-probs with the weights of an earlier update of the step."""

    @property
    def copy_handler(self) -> Callable[[torch.nn.Module], ShardedState]:
        """verl's copy of the weights, in memory of its own: on a CPU (or offloaded) verl's would be the weights."""
        verls_copy = super().copy_handler

        def copy(module: torch.nn.Module) -> ShardedState:
            shards, spec = verls_copy(module)
            lives_here = {name for name, weight in module.named_parameters() if weight.device.type == "cpu"}
            for name in lives_here & shards.keys():
                shard, placement = shards[name]
                shards[name] = shard.clone(), placement
            return shards, spec

        return copy

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_model_from_cpu(self, n: int) -> None:
        """Put weights back, after which nothing is known of any row's log-probs.

        Args:
            n: key under which `save_model_to_cpu` kept them.
        """
        super().restore_model_from_cpu(n)
        if isinstance(self.actor.engine, TreeFSDPEngineWithLMHead):
            self.actor.engine.forget()
