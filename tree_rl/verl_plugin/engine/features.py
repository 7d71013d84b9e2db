"""What the tree engine refuses, each with the config key that asked for it: never wrong by surprise."""

from typing import Any

from tensordict import TensorDict

from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.router_replay import COLUMN, DISABLED, FLAG, KEY, RECORDED, replay_mode
from tree_rl.verl_plugin.options import TreeConfig, as_tree_config


class UnsupportedFeatureError(ValueError):
    """A verl feature that the tree engine does not run; the message names its config key."""


def refuse_engine_features(model_config: Any, engine_config: Any, *, is_value: bool = False) -> None:
    """Check a configuration before the model is built.

    Args:
        model_config: verl's.
        engine_config: verl's, with the `tree` block.
        is_value: the engine is a critic's.

    Raises:
        UnsupportedFeatureError: names the key and its value.
    """
    mode = replay_mode(engine_config)
    is_flat = as_tree_config(engine_config.get("tree", None)).mode == "flat"
    qat = engine_config.get("qat", None)
    mtp = model_config.get("mtp", None)
    asked_for = {
        "fsdp_config.ulysses_sequence_parallel_size > 1": engine_config.ulysses_sequence_parallel_size > 1,
        "model.use_fused_kernels=True": model_config.get("use_fused_kernels", False),
        "fsdp_config.pad_to_length=True": engine_config.pad_to_length,
        f"{KEY}={mode} on a critic": is_value and mode != DISABLED,
        f"{KEY}={mode} with tree.mode=flat (stock verl's FSDP engine does not replay)": is_flat and mode != DISABLED,
        f"{KEY}={mode} on a reference policy, which would record its own routes": (
            engine_config.forward_only and mode == RECORDED
        ),
        "fsdp_config.qat.enable=True": qat is not None and qat.get("enable", False),
        "model.mtp.enable=True": mtp is not None and mtp.get("enable", False),
        "fsdp_config.strategy (tree_rl runs on fsdp2)": engine_config.strategy != "fsdp2",
    }
    for key, asked in asked_for.items():
        if asked:
            raise UnsupportedFeatureError(
                f"the tree engine does not support {key}; unset it, or train flat with tree.mode=flat on stock "
                "model_type=language_model"
            )


def refuse_flat_packing(leaks_when_packed: bool, engine_config: Any) -> None:
    """Check a built model whose rows would see each other when stock verl packs them into one sequence.

    Raises:
        UnsupportedFeatureError: `tree.mode=flat` with such a model.
    """
    if leaks_when_packed and engine_config.get("tree", {}).get("mode") == "flat":
        raise UnsupportedFeatureError(
            "tree.mode=flat packs rows into one sequence, in which this model's rows would see each other (linear "
            "attention layers carry their state on; transformers builds the masks of gpt_oss and afmoe without "
            "positions, which only flash attention makes up for); use tree.mode=tree, which keeps rows apart also "
            "where they share nothing"
        )


def refuse_foreign_old_log_probs(data: TensorDict, tree_config: TreeConfig) -> None:
    """Check an update whose old log-probs are columns of its rows.

    Raises:
        UnsupportedFeatureError: `tree.reuse_log_probs=True` under a trainer that does not know it.
    """
    if tree_config.reuse_log_probs is True and "old_log_probs" in data:
        raise UnsupportedFeatureError(
            "tree.reuse_log_probs=True, but the trainer has computed old_log_probs; choose a tree trainer "
            "(trainer.v1.trainer_mode=tree_sync), or set it to auto"
        )


def refuse_batch_features(data: TensorDict, *, ignores_routes: bool, is_actor: bool) -> None:
    """Check what a batch asks for.

    Args:
        data: verl's.
        ignores_routes: the engine neither records nor repeats routes.
        is_actor: the engine trains a policy, so that routes in its rows would matter.

    Raises:
        UnsupportedFeatureError: multimodal rows, top-k distillation, or routes that the engine would ignore.
    """
    for key in ("distillation_use_topk", "distillation_only"):
        if tu.get_non_tensor_data(data=data, key=key, default=False):
            raise UnsupportedFeatureError(f"the tree engine does not support {key}=True; use model_type=language_model")
    images = data.get("multi_modal_inputs", ())
    for row, inputs in enumerate(images):
        if tu.unwrap_non_tensor_data(inputs):
            raise UnsupportedFeatureError(
                f"row {row} carries multimodal inputs, which the tree engine cannot merge yet"
            )
    if "position_ids" in data and data["position_ids"].dim() == 3:
        raise UnsupportedFeatureError("rows carry three-dimensional (multimodal) position_ids")
    if not ignores_routes:
        return
    if tu.get_non_tensor_data(data=data, key=FLAG, default=False):
        raise UnsupportedFeatureError(f"{FLAG}=True, but {KEY}=disabled; set actor_rollout_ref.actor.{KEY}")
    if COLUMN in data and is_actor:
        raise UnsupportedFeatureError(
            f"rows carry {COLUMN}, which {KEY}=disabled ignores; set actor_rollout_ref.actor.{KEY}=R3 to repeat "
            "them, or actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
        )
