"""The `tree:` block of an engine config, and the model types that choose the tree engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config import FSDPEngineConfig

from tree_rl.option_types import check_type
from tree_rl.training.tree_options import AUTO, TreeOptions
from tree_rl.verl_plugin.did_you_mean import did_you_mean

ENGINES = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
"""Keys of an engine's options in verl's RL config: of the actor, the reference policy and the critic."""
DISABLED, RECORDED, ROLLOUT = REPLAY_MODES = ("disabled", "R2", "R3")
"""Values of verl's `router_replay.mode`."""
REPLAY_KEY = "fsdp_config.router_replay.mode"
ROUTES, REPLAYS = "routed_experts", "enable_routing_replay"
"""Column with routes to repeat; flag that verl's workers set per call for engines that replay in stock verl. Without
the flag, an engine with a mode replays."""
TREE_LANGUAGE_MODEL, TREE_VALUE_MODEL = "tree_language_model", "tree_value_model"
"""verl's `model_type` of the tree engines: one for actor, reference policy and SFT, one for the critic."""

PATH_WEIGHT_COLUMNS = {
    "sep_avg": "tree_row_weights",
    "token_unique": "tree_token_weights",
    "session": "tree_session_weights",
    "custom": "tree_custom_weights",
}
"""Column of the trainer's weights, one entry per response token, by `tree.path_weighting`; without the column an engine
counts the rows of its call, or refuses it."""


@dataclass
class TreeConfig(TreeOptions, BaseConfig):
    """`TreeOptions` in verl's configs; raises a ValueError that names the key of an invalid value."""

    reuse_log_probs: bool | str = AUTO
    """Source of the actor's old log-probs under the tree trainers: `auto` takes them from the update's forward in every
    step in which they are the same, true does so or refuses the job, false runs verl's pass before each update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.reuse_log_probs, bool) or self.reuse_log_probs == AUTO):
            raise ValueError(f"tree.reuse_log_probs={self.reuse_log_probs!r}: expected auto, true or false")
        if not isinstance(self.self_check, bool):
            raise ValueError(f"tree.self_check={self.self_check!r}: expected true or false")


@dataclass
class TreeFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP options plus the `tree:` block.

    Select it with `fsdp_config._target_=tree_rl.verl_plugin.options.TreeFSDPEngineConfig`. Without it the tree engine
    uses the defaults of `TreeConfig`.
    """

    strategy: str = "fsdp2"
    """FSDP version; the tree engine needs FSDP2."""

    tree: Any = field(default_factory=TreeConfig)
    """Tree options: a `TreeConfig` or a mapping with its keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Hydra passes nested nodes without a _target_ as mappings.
        object.__setattr__(self, "tree", as_tree_config(self.tree))


def as_tree_config(value: Any) -> TreeConfig:
    """Convert a config's `tree:` node to a `TreeConfig`; raises a ValueError that names an unknown key or value."""
    if isinstance(value, TreeConfig):
        return value
    check_type("tree", value, Mapping | None)
    known = TreeConfig.__dataclass_fields__
    given = {key: entry for key, entry in (value or {}).items() if key != "_target_"}
    unknown = sorted(set(given) - set(known))
    if unknown:
        names = sorted(set(known) - {"_target_"})
        hint = did_you_mean(f"tree.{unknown[0]}", (f"tree.{name}" for name in names)) or ";"
        raise ValueError(f"tree.{unknown[0]}: no such option{hint} known are {', '.join(names)}")
    return TreeConfig(**given)


def replay_mode(engine_config: Any) -> str:
    """The `router_replay.mode` of an engine's config. Raises `ValueError` if it is none of verl's modes."""
    config = engine_config.get("router_replay", None)
    mode = DISABLED if config is None else str(config.get("mode", DISABLED))
    if mode not in REPLAY_MODES:
        raise ValueError(f"{REPLAY_KEY}={mode}: expected one of {', '.join(REPLAY_MODES)}")
    return mode
