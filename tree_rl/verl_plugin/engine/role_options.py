"""Options of verl's actor, reference policy and critic: what a tree run refuses or passes on, before a worker starts.

Some of them verl 0.9.1 declares and never reads. Where a user would expect an effect, the run stops.
"""

import math
from typing import Any

from omegaconf import DictConfig

from tree_rl.verl_plugin.compat import get_distillation_loss_settings
from tree_rl.verl_plugin.engine.features import (
    SEQUENCE_PARALLEL,
    UnsupportedFeatureError,
    refuse_engine_options,
    refuse_first,
    refuse_model_options,
)
from tree_rl.verl_plugin.engine.router_replay import DISABLED, KEY, replay_mode
from tree_rl.verl_plugin.options import TREE_LANGUAGE_MODEL

VERLS_GRAD_CLIP, VERLS_CLIP_RATIO = 1.0, 0.2
"""Defaults of `grad_clip` and `clip_ratio`."""


def refuse_role_options(config: DictConfig, *, trains_tree_critic: bool) -> None:
    """Check the options of every role that a tree engine runs.

    Args:
        config: verl's whole config; roles have their model types.
        trains_tree_critic: a critic trains, on a tree engine.

    Raises:
        UnsupportedFeatureError: names the key, its value and the remedy.
    """
    roles = config.actor_rollout_ref
    actor, ref = roles.actor, roles.get("ref", None)
    if roles.model.model_type == TREE_LANGUAGE_MODEL:
        refuse_batches_to_come(config)
        refuse_model_options(roles.model, key="actor_rollout_ref.model")
        _refuse_clip_ratio(actor)
        _refuse_role(actor, "actor_rollout_ref.actor")
        refuse_engine_options(actor.get("fsdp_config", {}), key="actor_rollout_ref.actor.fsdp_config")
        if ref is not None and (config.algorithm.get("use_kl_in_reward", False) or actor.get("use_kl_loss", False)):
            strategy = ref.get("strategy", None)
            refuse_first(
                (strategy != "fsdp2", f"actor_rollout_ref.ref.strategy={strategy}: trees run on FSDP2; set fsdp2")
            )
            _refuse_role(ref, "actor_rollout_ref.ref")
            refuse_engine_options(ref.get("fsdp_config", {}), key="actor_rollout_ref.ref.fsdp_config")
    if trains_tree_critic:
        refuse_model_options(config.critic.model, is_value=True, key="critic.model")
        _refuse_role(config.critic, "critic")
        refuse_engine_options(config.critic.get("fsdp", {}), is_value=True, key="critic.fsdp")
        _refuse_sequence_parallel_of_critic(config)


def refuse_job_options(config: DictConfig) -> None:
    """Check options that no engine sees, under the tree trainers and under verl's own with a tree engine.

    Raises:
        UnsupportedFeatureError: names the key, its value and the remedy.
    """
    rollout = config.actor_rollout_ref.rollout
    heat, validation = rollout.get("temperature", 1.0), (rollout.get("val_kwargs", None) or {}).get("temperature", 0)
    refuse_first(
        (
            not _is_number(heat) or heat <= 0,
            f"actor_rollout_ref.rollout.temperature={heat}: training divides logits by it; expected a number above 0 "
            "(validation alone may draw greedily: actor_rollout_ref.rollout.val_kwargs.temperature=0)",
        ),
        (
            not _is_number(validation) or validation < 0,
            f"actor_rollout_ref.rollout.val_kwargs.temperature={validation}: expected 0 (greedy) or a number above 0",
        ),
        (
            config.algorithm.get("use_pf_ppo", False),
            "algorithm.use_pf_ppo=True: verl's V1 trainers resample advantages and not the rows they belong to; set it "
            "to False",
        ),
    )


def refuse_batches_to_come(config: DictConfig) -> None:
    """Refuse what verl's config asks of every batch, which `refuse_batch_features` would refuse after the rollouts.

    Raises:
        UnsupportedFeatureError: top-k distillation, or recorded routes that no engine repeats.
    """
    distillation, roles = config.get("distillation", None) or {}, config.actor_rollout_ref
    loss = (distillation.get("distillation_loss", None) or {}).get("loss_mode", None)
    records = roles.rollout.get("enable_rollout_routing_replay", False)
    replays = replay_mode(roles.actor.get("fsdp_config", None) or {}) != DISABLED
    refuse_first(
        (
            distillation.get("enabled", False) and loss is not None and get_distillation_loss_settings(loss).use_topk,
            f"distillation.distillation_loss.loss_mode={loss}: it needs the logits of other tokens than the trained "
            "ones, which the head of a tree does not compute; set distillation.distillation_loss.loss_mode=k3, or "
            "train without trees",
        ),
        (
            records and not replays,
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True beside "
            f"actor_rollout_ref.actor.{KEY}=disabled, which ignores the routes; set actor_rollout_ref.actor.{KEY}=R3, "
            "or the first to False",
        ),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_role(role: DictConfig, key: str) -> None:
    """Refuse options of a role that verl's V1 trainers and FSDP engine do not read, and copies of refused ones."""
    optimizer, grad_clip = role.get("optim", None) or {}, role.get("grad_clip", None)
    clips_at = optimizer.get("grad_clip", None) or optimizer.get("clip_grad", None)
    without = "trees run without it; set it to False"
    refuse_first(
        (role.get("use_fused_kernels", False), f"{key}.use_fused_kernels=True: {without}"),
        (role.get("pad_to_length", False), f"{key}.pad_to_length=True: {without}"),
        ((role.get("qat", None) or {}).get("enable", False), f"{key}.qat.enable=True: {without}"),
        (
            role.get("use_prefix_grouper", False),
            f"{key}.use_prefix_grouper=True: verl's V1 trainers do not read it, and trees share prefixes already; set "
            "it to False",
        ),
        (
            role.get("use_rollout_log_probs", False),
            f"{key}.use_rollout_log_probs=True: verl does not read it; set it to False and "
            "algorithm.rollout_correction.bypass_mode=True",
        ),
        (
            grad_clip not in (None, VERLS_GRAD_CLIP, clips_at),
            f"{key}.grad_clip={grad_clip}: verl's FSDP engine clips at optim.clip_grad={clips_at}; set "
            f"{key}.optim.clip_grad",
        ),
        (
            (role.get("checkpoint", None) or {}).get("async_save", False),
            f"{key}.checkpoint.async_save=True: only Megatron saves in the background, and verl would not name the "
            "checkpoint to resume from; set it to False",
        ),
    )


def _refuse_sequence_parallel_of_critic(config: DictConfig) -> None:
    """Mini-batches are laid out for the actor's ranks, and a critic of fewer or more would cut them elsewhere."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    asked, its_own = critic.get(SEQUENCE_PARALLEL, 1), (critic.get("fsdp", None) or {}).get(SEQUENCE_PARALLEL, 1)
    # verl copies the role's own key to the engine.
    in_role, in_engine = (
        actor.get(SEQUENCE_PARALLEL, 1),
        (actor.get("fsdp_config", None) or {}).get(SEQUENCE_PARALLEL, 1),
    )
    of_actor = in_role if in_role > 1 else in_engine
    refuse_first(
        (
            asked not in (1, its_own),
            f"critic.{SEQUENCE_PARALLEL}={asked}: verl's critic does not read it; set critic.fsdp.{SEQUENCE_PARALLEL}",
        ),
        (
            its_own != of_actor,
            f"critic.fsdp.{SEQUENCE_PARALLEL}={its_own} beside an actor's {of_actor}: both train the same mini-batches "
            "of as many ranks; set them to one size",
        ),
    )


def _refuse_clip_ratio(actor: DictConfig) -> None:
    """verl's losses read `clip_ratio` only where a bound is null, and by default neither is."""
    ratio, low, high = (actor.get(name, None) for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    refuse_first(
        (
            None not in (low, high) and ratio not in (None, VERLS_CLIP_RATIO, low, high),
            f"actor_rollout_ref.actor.clip_ratio={ratio}: verl reads clip_ratio_low={low} and clip_ratio_high={high} "
            "instead; set those",
        )
    )


def pass_on_critic_budget(critic: DictConfig) -> None:
    """Give a critic's engine the budget of a forward that `critic.*` names, as verl does for the actor.

    verl's V1 trainers pass on `ppo_infer_max_token_len_per_gpu` alone, to training too.

    Args:
        critic: node of a tree critic, changed in place; it takes new keys.

    Raises:
        UnsupportedFeatureError: two budgets that differ.
    """
    train, infer = critic.get("ppo_max_token_len_per_gpu", None), critic.get("ppo_infer_max_token_len_per_gpu", None)
    if infer is None and train is not None:
        critic.ppo_infer_max_token_len_per_gpu = train
    elif infer != train:
        raise UnsupportedFeatureError(
            f"critic.ppo_infer_max_token_len_per_gpu={infer}: verl's V1 trainers train with it too, and "
            f"critic.ppo_max_token_len_per_gpu={train}; set one value"
        )
    if not critic.get("use_dynamic_bsz", True):
        train_rows, infer_rows = critic.ppo_micro_batch_size_per_gpu, critic.get("ppo_infer_micro_batch_size_per_gpu")
        critic.fsdp.use_dynamic_bsz = False
        critic.fsdp.micro_batch_size_per_gpu = train_rows
        critic.fsdp.infer_micro_batch_size_per_gpu = infer_rows or train_rows
