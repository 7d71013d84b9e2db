"""The options of the embedded rollout engine: `rollout.engine_kwargs.hf`."""

from dataclasses import dataclass, fields
from typing import Any

from tree_rl.verl_plugin.embedded_rollout.sampling import NO_JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class HFRolloutOptions:
    """Options; raises a ValueError that names the config key of a value out of range."""

    kv_cache_bytes: int = 2 << 30
    """Memory for keys and values of one server, which limits the number of concurrent requests."""

    def __post_init__(self) -> None:
        value: Any = self.kv_cache_bytes
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"rollout.engine_kwargs.hf.kv_cache_bytes={value!r}: expected a positive integer")

    @classmethod
    def from_rollout(cls, config: Any) -> "HFRolloutOptions":
        """Read `engine_kwargs.hf` of verl's `RolloutConfig`. Raises `ValueError` for a key that is not supported."""
        for key in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
            value = getattr(config, key)
            if value != 1:
                raise ValueError(f"rollout.{key}={value}: rollout.name=hf runs one process per replica, expected 1")
        if config.enable_rollout_routing_replay:
            raise ValueError("rollout.enable_rollout_routing_replay=True: not supported by rollout.name=hf")
        agents = (config.custom or {}).get("gateway_agent") or {}
        if (agents.get("gateway") or {}).get("json_output") == "enforce":
            raise ValueError(f"gateway.{NO_JSON}")
        given = dict((config.engine_kwargs or {}).get("hf") or {})
        known = [field.name for field in fields(cls)]
        unknown = sorted(given.keys() - known)
        if unknown:
            raise ValueError(f"rollout.engine_kwargs.hf.{unknown[0]}: no such option; known are {', '.join(known)}")
        return cls(**given)
