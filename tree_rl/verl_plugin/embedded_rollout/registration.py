"""Makes `actor_rollout_ref.rollout.name=hf` known to verl, without importing the engine before it is asked for."""

from importlib import import_module

from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from tree_rl.verl_plugin import compat

ROLLOUT_NAME = "hf"


def register_hf_rollout() -> None:
    """Register the server side (replica) and the trainer side (adapter) of the embedded engine. Idempotent."""
    RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)
    compat._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "tree_rl.verl_plugin.embedded_rollout.replica.HFServerAdapter"


def _load_replica() -> type[RolloutReplica]:
    return import_module("tree_rl.verl_plugin.embedded_rollout.replica").HFReplica


register_hf_rollout()
