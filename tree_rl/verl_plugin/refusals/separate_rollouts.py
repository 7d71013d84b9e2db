"""Conditions of the table of refusals about rollouts on devices of their own (`tree_separate_async`)."""

from typing import Any

from tree_rl.verl_plugin.refusals.conditions import ROLLOUT, Condition, Words
from tree_rl.verl_plugin.refusals.refusal import option


def in_separate(condition: Condition) -> Condition:
    """The condition, in jobs with separate rollouts alone."""
    return lambda value, config: separates(config) and condition(value, config)


def separates(config: Any) -> bool:
    """True if rollouts have devices of their own."""
    return str(option(config, "trainer.v1.trainer_mode")).removeprefix("tree_") == "separate_async"


def num_rollout_gpus(config: Any) -> int:
    """Number of GPUs that a job's rollouts have besides the trainer's."""
    return (
        option(config, f"{ROLLOUT}.n_gpus_per_node") * option(config, f"{ROLLOUT}.nnodes") if separates(config) else 0
    )


def is_no_product(batch: Any, config: Any) -> Words | None:
    """A number of prompts of a step that its updates do not train exactly."""
    updates = option(config, "trainer.v1.separate_async.parameter_sync_step")
    prompts = option(config, "actor_rollout_ref.actor.ppo_mini_batch_size")
    return {"updates": updates, "prompts": prompts} if batch != updates * prompts else None
