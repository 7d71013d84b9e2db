"""Checks a whole job by the table of refusals: every role that trains on trees."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tree_rl.models.sequence_parallel_support import KEY as SEQUENCE_PARALLEL
from tree_rl.verl_plugin.compat import need_critic
from tree_rl.verl_plugin.options import ENGINES, TREE_LANGUAGE_MODEL
from tree_rl.verl_plugin.refusals.refusal import Of, option
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Config keys of a role that runs trees."""

    key: str
    model: str
    engine: str
    is_critic: bool = False


def tree_roles(config: DictConfig) -> Iterator[Role]:
    """The roles of a prepared config that a tree engine runs."""
    policy, critic = "actor_rollout_ref.model", "critic.model"
    if option(config, f"{policy}.model_type") == TREE_LANGUAGE_MODEL:
        yield Role(key=ACTOR, model=policy, engine=ENGINES[0])
        if option(config, "algorithm.use_kl_in_reward") or option(config, f"{ACTOR}.use_kl_loss"):
            yield Role(key="actor_rollout_ref.ref", model=policy, engine=ENGINES[1])
    if need_critic(config) and str(option(config, f"{critic}.model_type", "")).startswith("tree"):
        yield Role(key="critic", model=critic, engine=ENGINES[2], is_critic=True)


def refuse_job(config: DictConfig, *, under_tree_trainer: bool) -> None:
    """Check everything that depends only on verl's whole config, whose roles have their model types.

    Raises an UnsupportedFeatureError for a setting that a tree run cannot honour.
    """
    refuse_if_unsupported(config, "", Of.JOB, *(() if under_tree_trainer else (Of.VERLS_TRAINER,)))
    for role in tree_roles(config):
        node, model, engine = (OmegaConf.select(config, key) or {} for key in (role.key, role.model, role.engine))
        refuse_if_unsupported(node, role.key, Of.STRATEGY)
        if role.key == ACTOR:
            refuse_if_unsupported(config, "", Of.POLICY)
        refuse_if_unsupported(model, role.model, *(Of.MODEL, Of.CRITIC_MODEL)[: 1 + role.is_critic])
        refuse_if_unsupported(node, role.key, *((Of.ACTOR,) if role.key == ACTOR else ()), Of.ROLE)
        refuse_if_unsupported(engine, role.engine, *(Of.ENGINE, Of.CRITIC_ENGINE)[: 1 + role.is_critic])
        if role.is_critic and under_tree_trainer:
            refuse_if_unsupported(config, "", Of.CRITIC)


def refuse_engine(model: Any, engine: Any, *, is_critic: bool = False, key: str | None = None) -> None:
    """Check one engine: verl's `HFModelConfig` and `FSDPEngineConfig`, or their nodes.

    `key` is the key of the engine's node if it is no role's. Raises an UnsupportedFeatureError that names the key.
    """
    refuse_if_unsupported(engine, key or ("critic" if is_critic else ACTOR), Of.STRATEGY)
    refuse_if_unsupported(model, "model", *(Of.MODEL, Of.CRITIC_MODEL)[: 1 + is_critic])
    refuse_if_unsupported(engine, key or "fsdp_config", *(Of.ENGINE, Of.CRITIC_ENGINE)[: 1 + is_critic])


def refuse_ranks(engine: Any, place: str, num_ranks: int) -> None:
    """Check that the sizes of an engine's groups of ranks divide their number.

    `place` is the dotted key of the engine's node. Raises an UnsupportedFeatureError that names the key.
    """
    sizes = {SEQUENCE_PARALLEL: option(engine, SEQUENCE_PARALLEL, 1), "fsdp_size": option(engine, "fsdp_size", -1)}
    refuse_if_unsupported({**sizes, "ranks": num_ranks}, place, Of.RANKS)


def refuse_cluster(trainer: Any, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Check that Ray's `nodes` have the GPUs that the config's `trainer` node asks for.

    Raises an UnsupportedFeatureError that names the key.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = [int(found.get("GPU", found.get("NPU", 0))) for found in resources]
    asked = {"n_gpus_per_node": trainer.n_gpus_per_node, "nnodes": trainer.nnodes, "gpus": gpus}
    refuse_if_unsupported(asked, "trainer", Of.CLUSTER)
