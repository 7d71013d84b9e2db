"""verl's three V1 trainers on trees: `tree_sync`, `tree_colocate_async` and `tree_separate_async`."""

from typing import Any

from verl.trainer.ppo.v1.trainer_base import register_trainer

from tree_rl.verl_plugin.compat import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from tree_rl.verl_plugin.trainer.tree_trainer import TreeTrainerMixin
from tree_rl.verl_plugin.trainer.workers import TreeDetachActorWorker


@register_trainer("tree_sync")
class PPOTrainerTreeSync(TreeTrainerMixin, PPOTrainerSync):
    """Rollout and training alternate: `trainer.v1.trainer_mode=tree_sync`."""

    base_trainer_mode = "sync"
    _has_begun_next = False
    """True if the next step's sessions run already."""

    def prepare_step(self) -> dict[str, Any]:
        """Begin the step's sessions, unless they run."""
        begun, self._has_begun_next = self._has_begun_next, False
        return {} if begun else super().prepare_step()

    def _compute_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Begin the next step's sessions first: the servers have its weights, and metrics need no device."""
        is_last = self.global_steps >= self.total_training_steps
        is_last |= self.global_steps // self.steps_per_epoch >= self.config.trainer.total_epochs
        # verl loads the sessions of a step to skip by its own counter, and begins a step's profile with the step.
        if not (is_last or self.curr_step_profile or self.config.skip.rollout_tq.enable):
            self.global_steps += 1
            self._has_begun_next = True
            self._add_batch_to_generate()
            self.global_steps -= 1
        super()._compute_metrics(*args, **kwargs)


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
