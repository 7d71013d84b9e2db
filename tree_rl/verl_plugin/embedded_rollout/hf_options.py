"""The options of the embedded rollout engine: `rollout.engine_kwargs.hf`."""

from dataclasses import dataclass
from typing import Any

from tree_rl.option_types import check_options
from tree_rl.verl_plugin.embedded_rollout.sampling import NO_JSON

KEY = "actor_rollout_ref.rollout.engine_kwargs.hf"


@dataclass(frozen=True, kw_only=True, slots=True)
class HFRolloutOptions:
    """Options; raises a ValueError that names the config key of a value out of range."""

    kv_cache_bytes: int = 2 << 30
    """Memory for keys and values of one server, which limits the number of concurrent requests."""

    def __post_init__(self) -> None:
        if self.kv_cache_bytes < 1:
            raise ValueError(f"{KEY}.kv_cache_bytes={self.kv_cache_bytes}: expected a positive integer")

    @classmethod
    def from_rollout(cls, config: Any) -> "HFRolloutOptions":
        """Read `engine_kwargs.hf` of verl's `RolloutConfig`. Raises `ValueError` for a key that is not supported."""
        for key in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
            value = getattr(config, key)
            if value != 1:
                raise ValueError(f"rollout.{key}={value}: rollout.name=hf runs one process per replica, expected 1")
        if config.enable_rollout_routing_replay:
            raise ValueError("rollout.enable_rollout_routing_replay=True: not supported by rollout.name=hf")
        agents = (config.get("custom", None) or {}).get("gateway_agent") or {}
        if (agents.get("gateway") or {}).get("json_output") == "enforce":
            raise ValueError(f"gateway.{NO_JSON}")
        given = (config.get("engine_kwargs", None) or {}).get("hf") or {}
        check_options(KEY, given, cls)
        return cls(**given)
