"""`tree.reuse_log_probs`: decides when old log-probs can be those of the update's forward, which saves verl's pass.

They are the same if one optimizer step trains all rows with the same weights. Features that need them before the update
still need the pass.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tree_rl.training.tree_options import AUTO
from tree_rl.verl_plugin.options import ENGINES, RECORDED, TREE_LANGUAGE_MODEL, as_tree_config, replay_mode
from tree_rl.verl_plugin.refusals.conditions import CORRECTION, NEEDS_SUM_PI_SQUARED
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

logger = logging.getLogger(__name__)

ENGINE = ENGINES[0]
KEY = f"{ENGINE}.tree.reuse_log_probs"


@dataclass(kw_only=True, slots=True)
class LogProbReuse:
    """The setting of a run, and the decision for each update."""

    setting: bool | str
    conflict: str | None
    """The setting of the run's config that needs the pass; None if none does."""
    logged: set[str] = field(default_factory=set)
    """Sources of old log-probs in the log so far."""

    @classmethod
    def of(cls, config: DictConfig) -> "LogProbReuse":
        """Read a run's config; raises an UnsupportedFeatureError if `reuse_log_probs=True`, but the pass is needed."""
        tree = as_tree_config(OmegaConf.select(config, f"{ENGINE}.tree"))
        setting = tree.reuse_log_probs
        if setting is False:
            return cls(setting=setting, conflict=f"{KEY}=False")
        conflict = _conflict(config)
        if setting is True:
            conflict = conflict or _conflict_of_batches(config)
            if conflict is not None:
                raise UnsupportedFeatureError(f"{KEY}=True, but {conflict}; set it to auto")
        elif conflict is None and tree.router_aux_loss_coef:
            conflict = (
                f"tree.router_aux_loss_coef={tree.router_aux_loss_coef} counts experts in a pass, which finds both"
            )
        return cls(setting=setting, conflict=conflict)

    def serves(self, optimizer_steps: int, *, needs_earlier_weights: bool = False) -> bool:
        """True if the update's log-probs replace the pass; logs each source once.

        Args:
            optimizer_steps: number of mini-batches times epochs; 0 while only the critic trains.
            needs_earlier_weights: True if old log-probs need earlier weights than the update's.

        Raises:
            UnsupportedFeatureError: `reuse_log_probs=True`, but this update needs the pass.
        """
        reason = self.conflict
        if reason is None and needs_earlier_weights:
            reason = "this update takes them from the weights of an earlier one"
        elif reason is None and optimizer_steps != 1:
            several = f"the update takes {optimizer_steps} optimizer steps"
            reason = several if optimizer_steps else "the actor does not train yet (trainer.critic_warmup)"
        if reason is not None and self.setting is True and optimizer_steps:
            raise UnsupportedFeatureError(f"{KEY}=True, but {reason}; set it to {AUTO}")
        source = "the update's forward" if reason is None else f"a pass before the update: {reason}"
        if source not in self.logged:
            self.logged.add(source)
            logger.warning("old log-probs are those of %s", source)
        return reason is None


def _conflict(config: DictConfig) -> str | None:
    """The setting that needs old log-probs before the update, or other ones than the update's."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    algorithm = config.algorithm
    correction: Any = algorithm.get("rollout_correction", None) or {}
    compares = [f"{key}={correction.get(key)}" for key in ("rollout_is", "rollout_rs") if correction.get(key)]
    epochs = actor.get("ppo_epochs", 1)
    replay = replay_mode(OmegaConf.select(config, ENGINE) or {})
    needs = {
        f"actor_rollout_ref.model.model_type={model.model_type} is no tree engine": (
            model.model_type != TREE_LANGUAGE_MODEL
        ),
        f"actor_rollout_ref.actor.ppo_epochs={epochs} trains on every row again": epochs > 1,
        "algorithm.use_kl_in_reward=True needs them for the reward": algorithm.get("use_kl_in_reward", False),
        f"{CORRECTION}.bypass_mode=True takes those of the rollout": correction.get("bypass_mode", False),
        f"{CORRECTION}.{', '.join(compares)} compares them with the rollout's": compares,
        f"algorithm.adv_estimator={algorithm.adv_estimator} needs them for the advantages": (
            str(algorithm.adv_estimator) in NEEDS_SUM_PI_SQUARED
        ),
        f"{ENGINE}.router_replay.mode={RECORDED} records routes beside them": replay == RECORDED,
        "distillation.enabled=True has losses of its own": OmegaConf.select(config, "distillation.enabled"),
    }
    return next((reason for reason, is_needed in needs.items() if is_needed), None)


def _conflict_of_batches(config: DictConfig) -> str | None:
    """Settings by which an update has several optimizer steps or earlier weights, if all batches are full."""
    trainer, mini_batch = config.trainer.v1, config.actor_rollout_ref.actor.get("ppo_mini_batch_size", None)
    updates = trainer.get(trainer.trainer_mode, {}).get("parameter_sync_step", 1)
    if updates > 1 and trainer.trainer_mode == "separate_async":
        return (
            f"trainer.v1.separate_async.parameter_sync_step={updates} takes them from the weights before the first of "
            "these updates"
        )
    prompts = OmegaConf.select(config, "data.train_batch_size")
    if prompts is not None and mini_batch is not None and prompts // updates > mini_batch:
        return (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch} cuts the {prompts // updates} prompts of an "
            "update into several optimizer steps"
        )
    return None
