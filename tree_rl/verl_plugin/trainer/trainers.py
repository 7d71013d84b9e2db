"""verl's three V1 trainers on trees: `tree_sync`, `tree_colocate_async` and `tree_separate_async`."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.trainer.ppo.v1.trainer_base import register_trainer

from tree_rl.verl_plugin.compat import KVBatchMeta, PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync
from tree_rl.verl_plugin.trainer.tree_trainer import TreeTrainerMixin
from tree_rl.verl_plugin.trainer.workers import TreeDetachActorWorker


@register_trainer("tree_sync")
class PPOTrainerTreeSync(TreeTrainerMixin, PPOTrainerSync):
    """Rollout and training alternate: `trainer.v1.trainer_mode=tree_sync`."""

    _begun_at: float | None = None
    """When the next step's sessions began, by `time.perf_counter`; None if they have not."""
    _head_start = 0.0
    """Seconds that the step's sessions ran before it began."""

    def prepare_step(self) -> dict[str, Any]:
        """Begin the step's sessions, unless they are already running."""
        begun, self._begun_at = self._begun_at, None
        self._head_start = 0.0 if begun is None else time.perf_counter() - begun
        return super().prepare_step() if begun is None else {}

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """Begin the next step's sessions first: the servers have its weights, and metrics need no device."""
        is_last = self.global_steps >= self.total_training_steps
        is_last |= self.global_steps // self.steps_per_epoch >= self.config.trainer.total_epochs
        # verl loads the sessions of a step to skip by its own counter, and begins a step's profile with the step.
        if not (is_last or self.curr_step_profile or self.config.skip.rollout_tq.enable):
            self.global_steps += 1
            self._begun_at = time.perf_counter()
            self._add_batch_to_generate()
            self.global_steps -= 1
        if self._head_start:
            # verl's timers began with the step.
            metrics["tree/head_start_seconds"] = self._head_start
            timing_raw["gen"] += self._head_start
            timing_raw["step"] += self._head_start
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)


@register_trainer("tree_colocate_async")
class PPOTrainerTreeColocateAsync(TreeTrainerMixin, PPOTrainerColocateAsync):
    """Rollout and training alternate on the same devices; unfinished generations continue with the next weights."""


@register_trainer("tree_separate_async")
class PPOTrainerTreeSeparateAsync(TreeTrainerMixin, PPOTrainerSeparateAsync):
    """Rollout runs continuously on separate devices; its weights may be several updates old."""

    actor_worker = TreeDetachActorWorker

    def _setup(self) -> None:
        # With hybrid_engine=False verl 0.9.1 logs a line of level INFO by `info(..., flush=True)`, which raises.
        with at_least(logging.WARNING, logging.getLogger(PPOTrainerSeparateAsync.__module__)):
            super()._setup()


@contextmanager
def at_least(level: int, logger: logging.Logger) -> Iterator[None]:
    """Drop a logger's messages below a level."""
    before = logger.level
    logger.setLevel(max(level, before))
    try:
        yield
    finally:
        logger.setLevel(before)
