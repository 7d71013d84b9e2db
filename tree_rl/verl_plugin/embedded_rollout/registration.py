"""Registers `actor_rollout_ref.rollout.name=hf` with verl; the engine itself is imported when it is first used."""

from importlib import import_module

from verl.workers.rollout.replica import RolloutReplicaRegistry

from tree_rl.verl_plugin import compat

REPLICA = "tree_rl.verl_plugin.embedded_rollout.replica"

RolloutReplicaRegistry.register("hf", lambda: import_module(REPLICA).HFReplica)
compat._ROLLOUT_REGISTRY[("hf", "async")] = f"{REPLICA}.HFServerAdapter"
