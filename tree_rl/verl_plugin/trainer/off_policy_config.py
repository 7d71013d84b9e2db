"""Settings of `algorithm.rollout_correction` that verl's V1 trainers would drop without a word."""

from omegaconf import DictConfig

from tree_rl.verl_plugin.engine.features import UnsupportedFeatureError

KEY = "algorithm.rollout_correction"


def refuse_dropped_correction(config: DictConfig) -> None:
    """Check that what the config asks for against stale rollouts will happen.

    Args:
        config: verl's whole config.

    Raises:
        UnsupportedFeatureError: a correction without the rollout's log-probs, or one that bypass mode leaves to a loss
            that is not chosen; names the key and the remedy.
    """
    correction = config.algorithm.get("rollout_correction", None)
    if correction is None:
        return
    bypass = bool(correction.get("bypass_mode", False))
    asked = [name for name in ("rollout_is", "rollout_rs") if correction.get(name, None) is not None]
    asked += ["bypass_mode"] if bypass else []
    if asked and not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise UnsupportedFeatureError(
            f"{KEY}.{asked[0]}={correction[asked[0]]} compares with the rollout's log-probs, which "
            "actor_rollout_ref.rollout.calculate_log_probs=False leaves out; set it to True"
        )
    loss_type = correction.get("loss_type", "ppo_clip")
    dropped = (
        f"loss_type={loss_type}" if loss_type != "ppo_clip" else f"rollout_rs={correction.get('rollout_rs', None)}"
    )
    is_dropped = loss_type != "ppo_clip" or correction.get("rollout_rs", None) is not None
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if bypass and is_dropped and loss_mode != "bypass_mode":
        raise UnsupportedFeatureError(
            f"{KEY}.{dropped} with {KEY}.bypass_mode=True is up to the loss, and policy_loss.loss_mode={loss_mode} "
            "ignores it; set actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode and "
            "+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}"
        )
