"""verl's three V1 trainers on trees: `tree_sync`, `tree_colocate_async` and `tree_separate_async`."""

from verl.trainer.ppo.v1.trainer_base import register_trainer

from tree_rl.verl_plugin.compat import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from tree_rl.verl_plugin.trainer.tree_trainer import TreeTrainerMixin
from tree_rl.verl_plugin.trainer.workers import TreeDetachActorWorker


@register_trainer("tree_sync")
class PPOTrainerTreeSync(TreeTrainerMixin, PPOTrainerSync):
    """Rollout and training take turns: `trainer.v1.trainer_mode=tree_sync`."""

    base_trainer_mode = "sync"


@register_trainer("tree_colocate_async")
class PPOTrainerTreeColocateAsync(TreeTrainerMixin, PPOTrainerColocateAsync):
    """Rollout and training take turns on the same devices; unfinished generations go on with the next weights."""

    base_trainer_mode = "colocate_async"


@register_trainer("tree_separate_async")
class PPOTrainerTreeSeparateAsync(TreeTrainerMixin, PPOTrainerSeparateAsync):
    """Rollout runs all the time on its own devices; its weights lag several updates behind."""

    base_trainer_mode = "separate_async"
    actor_worker = TreeDetachActorWorker

    def _restores_weights(self) -> bool:
        return self.local_trigger_step > 0

    def _skip_old_log_prob(self) -> None:
        """Put the weights aside, as verl's pass does: later updates of the step find their old log-probs with them."""
        if self.parameter_sync_step > 1:
            self.actor_rollout_wg.save_model_to_cpu(0)
