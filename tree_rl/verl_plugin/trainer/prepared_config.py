"""What the tree trainers set in verl's config, and what they refuse there, before any worker starts."""

from omegaconf import DictConfig, open_dict

from tree_rl.verl_plugin.compat import need_critic
from tree_rl.verl_plugin.engine.features import UnsupportedFeatureError
from tree_rl.verl_plugin.engine.role_options import pass_on_critic_budget, refuse_job_options, refuse_role_options
from tree_rl.verl_plugin.options import TREE_LANGUAGE_MODEL, TREE_VALUE_MODEL
from tree_rl.verl_plugin.trainer.old_log_probs.reuse import CORRECTION, NEEDS_SUM_PI_SQUARED

TREE_MANAGER = "tree_rl.verl_plugin.agent_loops.prompt_forests.TreeAgentLoopManager"


def prepare_config(config: DictConfig, base_trainer_mode: str) -> None:
    """Choose tree engines and the agent loop manager where the config names none, then refuse what trees cannot do.

    Args:
        config: verl's whole config, changed in place.
        base_trainer_mode: verl's mode of which this is the tree form. verl compares `trainer.v1.trainer_mode` with its
            own names and would treat an unknown one as asynchronous.

    Raises:
        UnsupportedFeatureError: a setting that a tree run cannot honour; names its key and the remedy.
    """
    actor, critic = config.actor_rollout_ref.model, config.critic.model
    with open_dict(config):
        config.trainer.v1.trainer_mode = base_trainer_mode
        for node, model_type in ((actor, TREE_LANGUAGE_MODEL), (critic, TREE_VALUE_MODEL)):
            if node.get("model_type", None) is None:
                node.model_type = model_type
        agent = config.actor_rollout_ref.rollout.agent
        if agent.get("agent_loop_manager_class", None) is None:
            agent.agent_loop_manager_class = TREE_MANAGER
        trains_tree_critic = need_critic(config) and critic.model_type == TREE_VALUE_MODEL
        if trains_tree_critic:
            pass_on_critic_budget(config.critic)
    refuse_job_options(config)
    _refuse_strategies(config, trains_tree_critic=trains_tree_critic)
    refuse_role_options(config, trains_tree_critic=trains_tree_critic)
    _refuse_estimators(config)
    refuse_dropped_correction(config)


def _refuse_strategies(config: DictConfig, *, trains_tree_critic: bool) -> None:
    actor = config.actor_rollout_ref
    if actor.model.model_type == TREE_LANGUAGE_MODEL and actor.actor.strategy != "fsdp2":
        raise UnsupportedFeatureError(
            f"actor_rollout_ref.actor.strategy={actor.actor.strategy}: trees run on FSDP2; set "
            "actor_rollout_ref.actor.strategy=fsdp2 (and critic.strategy=fsdp2 where a critic trains)"
        )
    if trains_tree_critic and config.critic.strategy != "fsdp2":
        raise UnsupportedFeatureError(f"critic.strategy={config.critic.strategy}: trees run on FSDP2; set fsdp2")


def _refuse_estimators(config: DictConfig) -> None:
    algorithm = config.algorithm
    estimator = str(algorithm.adv_estimator)
    if estimator == "remax":
        raise UnsupportedFeatureError(
            "algorithm.adv_estimator=remax: verl's V1 trainers roll out no greedy baseline (reward_baselines); choose "
            "another estimator, such as rloo"
        )
    correction = algorithm.get("rollout_correction", None)
    if estimator in NEEDS_SUM_PI_SQUARED and correction is not None and correction.get("bypass_mode", False):
        raise UnsupportedFeatureError(
            f"algorithm.adv_estimator={estimator} needs the actor's forward, which "
            f"{CORRECTION}.bypass_mode=True skips; set it to False"
        )


def refuse_dropped_correction(config: DictConfig) -> None:
    """Refuse a correction of stale rollouts that verl's V1 trainers would skip silently.

    Raises:
        UnsupportedFeatureError: the correction lacks the rollout's log-probs, or bypass mode leaves it to a loss that
            is not chosen; names the key and the remedy.
    """
    correction = config.algorithm.get("rollout_correction", None)
    if correction is None:
        return
    bypass = bool(correction.get("bypass_mode", False))
    asked = [name for name in ("rollout_is", "rollout_rs") if correction.get(name, None) is not None]
    asked += ["bypass_mode"] if bypass else []
    if asked and not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise UnsupportedFeatureError(
            f"{CORRECTION}.{asked[0]}={correction[asked[0]]} compares with the rollout's log-probs, which "
            "actor_rollout_ref.rollout.calculate_log_probs=False leaves out; set it to True"
        )
    settings = (("loss_type", "ppo_clip"), ("rollout_rs", None))
    changed = [name for name, default in settings if correction.get(name, default) != default]
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if bypass and changed and loss_mode != "bypass_mode":
        raise UnsupportedFeatureError(
            f"{CORRECTION}.{changed[0]}={correction[changed[0]]} with {CORRECTION}.bypass_mode=True is up to the loss, "
            f"and policy_loss.loss_mode={loss_mode} ignores it; set "
            "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode and "
            "'+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}'"
        )
