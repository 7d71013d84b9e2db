"""Checks whether a config of verl uses trees."""

from typing import Any

from omegaconf import OmegaConf

CHOICES = {
    "trainer.v1.trainer_mode": "tree_",
    "actor_rollout_ref.model.model_type": "tree_",
    "critic.model.model_type": "tree_",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "tree_rl.",
}
"""Prefix of the values that need the plugin, by config key."""


def asks_for_trees(config: Any) -> bool:
    """True if a config names something that only the plugin provides."""
    return any(str(OmegaConf.select(config, key, default="")).startswith(start) for key, start in CHOICES.items())


def trains_trees(config: Any) -> bool:
    """True if a config chooses a tree trainer or a tree engine."""
    keys = [key for key, start in CHOICES.items() if start == "tree_"]
    return any(str(OmegaConf.select(config, key, default="")).startswith("tree") for key in keys)
