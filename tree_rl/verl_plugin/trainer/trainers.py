"""verl's three V1 trainers on trees: `tree_sync`, `tree_colocate_async` and `tree_separate_async`."""

from verl.trainer.ppo.v1.trainer_base import register_trainer

from tree_rl.verl_plugin.compat import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from tree_rl.verl_plugin.trainer.tree_trainer import TreeTrainerMixin
from tree_rl.verl_plugin.trainer.workers import TreeDetachActorWorker


@register_trainer("tree_sync")
class PPOTrainerTreeSync(TreeTrainerMixin, PPOTrainerSync):
    """Rollout and training alternate: `trainer.v1.trainer_mode=tree_sync`."""

    base_trainer_mode = "sync"


@register_trainer("tree_colocate_async")
class PPOTrainerTreeColocateAsync(TreeTrainerMixin, PPOTrainerColocateAsync):
    """Rollout and training alternate on the same devices; unfinished generations continue with the next weights."""

    base_trainer_mode = "colocate_async"


@register_trainer("tree_separate_async")
class PPOTrainerTreeSeparateAsync(TreeTrainerMixin, PPOTrainerSeparateAsync):
    """Rollout runs continuously on separate devices; its weights may be several updates old."""

    base_trainer_mode = "separate_async"
    actor_worker = TreeDetachActorWorker

    def _needs_earlier_weights(self) -> bool:
        return self.local_trigger_step > 0

    def _skip_old_log_prob(self) -> None:
        """Save the weights, as verl's pass does, because later updates of the step need them for old log-probs."""
        if self.parameter_sync_step > 1:
            self.actor_rollout_wg.save_model_to_cpu(0)
