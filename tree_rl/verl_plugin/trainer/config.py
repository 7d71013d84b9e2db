"""What the tree trainers set in verl's config, and what they refuse there, before any worker starts."""

from omegaconf import DictConfig, open_dict

from tree_rl.verl_plugin.compat import need_critic
from tree_rl.verl_plugin.engine.features import UnsupportedFeatureError
from tree_rl.verl_plugin.options import TREE_LANGUAGE_MODEL, TREE_VALUE_MODEL
from tree_rl.verl_plugin.trainer.off_policy_config import refuse_dropped_correction

NEEDS_SUM_PI_SQUARED = ("optimal_token_baseline", "tir_optimal_token_baseline")

TREE_MANAGER = "tree_rl.verl_plugin.agent_loop_manager.TreeAgentLoopManager"


def prepare_config(config: DictConfig, base_trainer_mode: str) -> None:
    """Choose tree engines and manager where the config names none, and let verl see the trainer mode that it knows.

    Args:
        config: verl's whole config, changed in place.
        base_trainer_mode: verl's own mode of which this is the tree form. verl compares `trainer.v1.trainer_mode`
            literally, and would give an unknown name the semantics of its asynchronous modes.

    Raises:
        UnsupportedFeatureError: a setting that a tree run cannot honour; its key is named.
    """
    with open_dict(config):
        config.trainer.v1.trainer_mode = base_trainer_mode
        for node, model_type in (
            (config.actor_rollout_ref.model, TREE_LANGUAGE_MODEL),
            (config.critic.model, TREE_VALUE_MODEL),
        ):
            if node.get("model_type", None) is None:
                node.model_type = model_type
        agent = config.actor_rollout_ref.rollout.agent
        if agent.get("agent_loop_manager_class", None) is None:
            agent.agent_loop_manager_class = TREE_MANAGER
    refuse(config)
    refuse_dropped_correction(config)


def refuse(config: DictConfig) -> None:
    """Check the trainer's own settings.

    Raises:
        UnsupportedFeatureError: names the key, what it holds and the remedy.
    """
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if config.actor_rollout_ref.model.model_type == TREE_LANGUAGE_MODEL and actor.strategy != "fsdp2":
        raise UnsupportedFeatureError(
            f"actor_rollout_ref.actor.strategy={actor.strategy}: trees run on FSDP2; set "
            "actor_rollout_ref.actor.strategy=fsdp2 (and critic.strategy=fsdp2 where a critic trains)"
        )
    estimator = str(algorithm.adv_estimator)
    trains_tree_critic = need_critic(config) and config.critic.model.model_type == TREE_VALUE_MODEL
    if trains_tree_critic and config.critic.strategy != "fsdp2":
        raise UnsupportedFeatureError(f"critic.strategy={config.critic.strategy}: trees run on FSDP2; set fsdp2")
    if estimator == "remax":
        raise UnsupportedFeatureError(
            "algorithm.adv_estimator=remax: verl's V1 trainers roll out no greedy baseline (reward_baselines); choose "
            "another estimator, such as rloo"
        )
    correction = algorithm.get("rollout_correction", None)
    if estimator in NEEDS_SUM_PI_SQUARED and correction is not None and correction.get("bypass_mode", False):
        raise UnsupportedFeatureError(
            f"algorithm.adv_estimator={estimator} needs the actor's forward, which "
            "algorithm.rollout_correction.bypass_mode=True skips; set it to False"
        )
    if algorithm.get("use_pf_ppo", False):
        raise UnsupportedFeatureError(
            "algorithm.use_pf_ppo=True: it resamples rows, and a resampled row no longer belongs to its key; set False"
        )
