"""A condition of the table of refusals: options of rewards at an older place, which V1 trainers ignore."""

from typing import Any

from omegaconf import OmegaConf

from tree_rl.verl_plugin.refusals.conditions import Condition, Words
from tree_rl.verl_plugin.refusals.refusal import nodes_below, option

NOW_OF_REWARD = {
    "custom_reward_function": {},
    "reward_model": {
        "num_workers": "num_workers",
        "reward_manager": "reward_manager.name",
        "reward_loop_source": "reward_manager.source",
        "reward_loop_module_path": "reward_manager.module.path",
        "reward_loop_class_name": "reward_manager.module.name",
        "model.path": "reward_model.model_path",
    },
    "sandbox_fusion": {},
}
"""Older places of options of rewards, and keys under `reward` of those that did not keep their name."""


def is_read_elsewhere(place: str) -> Condition:
    """A condition for options below `place` with another value than the option that V1 trainers read."""

    def condition(node: Any, config: Any) -> Words | None:
        for name, asked in nodes_below(OmegaConf.to_container(node) if OmegaConf.is_config(node) else node or {}):
            now = f"reward.{NOW_OF_REWARD[place].get(name, f'{place}.{name}')}"
            if name.startswith("reward_kwargs."):
                now = f"+reward.{name}"
            is_set = not isinstance(asked, dict | None)
            if is_set and asked != option(config, now.lstrip("+")):
                return {"name": name, "asked": asked, "now": now}
        return None

    return condition
