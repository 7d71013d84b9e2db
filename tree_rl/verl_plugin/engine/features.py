"""What the tree engine refuses, each with the config key that asked for it: never wrong by surprise."""

import json
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tree_rl.models.dropout import ADAPTER_CONFIG, dropout_settings
from tree_rl.models.language_model import TYPE_IDS
from tree_rl.models.sequence_parallel_support import KEY as SEQUENCE_PARALLEL
from tree_rl.models.sequence_parallel_support import check_sequence_parallel
from tree_rl.training.tree_options import AUTO
from tree_rl.verl_plugin.compat import PrecisionType
from tree_rl.verl_plugin.compat import tensordict_utils as tu
from tree_rl.verl_plugin.engine.router_replay import COLUMN, DISABLED, FLAG, KEY, RECORDED, replay_mode
from tree_rl.verl_plugin.options import TreeConfig, as_tree_config

VERLS_DTYPE = "bfloat16"
"""The default of `fsdp_config.dtype`."""


class UnsupportedFeatureError(ValueError):
    """A verl feature that the tree engine does not run; the message names its config key."""


def refuse_engine_features(model_config: Any, engine_config: Any, *, is_value: bool = False) -> None:
    """Check a configuration before the model is built.

    Args:
        model_config: verl's.
        engine_config: verl's, with the `tree` block.
        is_value: the engine is a critic's.

    Raises:
        UnsupportedFeatureError: names the key, its value and the remedy.
    """
    if engine_config.strategy != "fsdp2":
        raise UnsupportedFeatureError(
            f"fsdp_config.strategy={engine_config.strategy}: trees run on FSDP2; set the role's strategy=fsdp2"
        )
    refuse_model_options(model_config, is_value=is_value)
    refuse_engine_options(engine_config, is_value=is_value)
    ulysses = engine_config.get(SEQUENCE_PARALLEL, 1)
    try:
        check_sequence_parallel(model_config.hf_config, ulysses)
    except ValueError as error:
        raise UnsupportedFeatureError(f"the tree engine does not support fsdp_config.{error}") from error


def refuse_model_options(model: Any, *, is_value: bool = False, key: str = "model") -> None:
    """Check a role's model options.

    Args:
        model: verl's `HFModelConfig`, or the node of a config that becomes one.
        is_value: a critic's.
        key: where it stands in the config, for messages.

    Raises:
        UnsupportedFeatureError: names the key, its value and the remedy.
    """
    mtp = model.get("mtp", None) or {}
    rank, adapter = model.get("lora_rank", 0), model.get("lora_adapter_path", None)
    dropouts = [] if adapter is None else _dropouts_of_adapter(adapter)
    megatron_rank = (model.get("lora", None) or {}).get("rank", 0)
    fused = model.get("use_liger", False)
    if fused not in (True, False, None, AUTO):
        raise UnsupportedFeatureError(f"{key}.use_liger={fused}: expected true, false or {AUTO}")
    refuse_first(
        (
            model.get("use_fused_kernels", False),
            f"{key}.use_fused_kernels=True: the head of a tree computes log-probs without logits by itself; set it to "
            "False",
        ),
        (
            model.get("enable_activation_offload", False),
            f"{key}.enable_activation_offload=True: verl's hooks count the layers of one forward, and trees keep "
            "several alive; set it to False and bound memory with fsdp_config.tree.max_tokens",
        ),
        (
            is_value and rank > 0,
            f"{key}.lora_rank={rank} on a critic: verl's adapters fit models that generate; set it to 0",
        ),
        (
            adapter is not None and rank <= 0,
            f"{key}.lora_adapter_path={adapter} with {key}.lora_rank={rank}: verl's FSDP engine then loads no adapter; "
            f"set {key}.lora_rank to the adapter's rank",
        ),
        (
            dropouts,
            f"{key}.lora_adapter_path={adapter}: its {ADAPTER_CONFIG} has {', '.join(dropouts)}, and branches would "
            "share one dropout mask; set that to 0.0 there",
        ),
        (
            megatron_rank > 0,
            f"{key}.lora.rank={megatron_rank}: only Megatron reads it, and verl would take the actor without adapters "
            f"for its own reference policy; set {key}.lora_rank={megatron_rank} and {key}.lora.rank=0",
        ),
        *(
            (
                mtp.get(name, False),
                f"{key}.mtp.{name}=True: verl's FSDP engine does not train multi-token prediction; set it to False",
            )
            for name in ("enable", "enable_train", "enable_rollout")
        ),
    )


def _dropouts_of_adapter(path: str) -> list[str]:
    """What a folder on this machine says; adapters elsewhere are checked when they are loaded."""
    file = Path(path, ADAPTER_CONFIG).expanduser()
    found = dropout_settings(json.loads(file.read_text())) if file.is_file() else {}
    return [f"{name}={value}" for name, value in found.items()]


def refuse_engine_options(engine: Any, *, is_value: bool = False, key: str = "fsdp_config") -> None:
    """Check a role's FSDP options.

    Args:
        engine: verl's `FSDPEngineConfig`, or the node of a config that becomes one; `strategy` is not read, which verl
            copies from the role.
        is_value: a critic's.
        key: where it stands in the config, for messages.

    Raises:
        UnsupportedFeatureError: names the key, its value and the remedy.
    """
    ulysses = engine.get(SEQUENCE_PARALLEL, 1)
    wrap = engine.get("wrap_policy", None) or {}
    replay = engine.get("router_replay", None) or {}
    dtype, computed = engine.get("dtype", None) or VERLS_DTYPE, _computed_dtype(engine)
    refuse_first(
        (
            ulysses > 1 and as_tree_config(engine.get("tree", None)).mode == "flat",
            f"{key}.ulysses_sequence_parallel_size={ulysses} with {key}.tree.mode=flat, which would leave it to stock "
            "verl; set tree.mode=tree, which runs rows that share nothing too, or model_type=language_model",
        ),
        (
            engine.get("pad_to_length", False),
            f"{key}.pad_to_length=True: a tree's forward has the length of its unique tokens; set it to False",
        ),
        (
            (engine.get("qat", None) or {}).get("enable", False),
            f"{key}.qat.enable=True: quantized weights are not tested on trees; set it to False",
        ),
        (
            dtype != VERLS_DTYPE and PrecisionType.to_dtype(dtype) != PrecisionType.to_dtype(computed),
            f"{key}.dtype={dtype}: verl's FSDP engine computes in mixed_precision.param_dtype={computed}; set "
            f"{key}.mixed_precision.param_dtype",
        ),
        *(
            (wrap.get(name, None), f"{key}.wrap_policy.{name}={wrap.get(name, None)}: FSDP2 shards by layer; unset it")
            for name in ("min_num_params", "disable")
        ),
        *(
            (
                replay.get(name, None),
                f"{key}.router_replay.{name}={replay.get(name, None)}: verl reads and writes no such file; unset it",
            )
            for name in ("record_file", "replay_file")
        ),
    )
    _refuse_replay(engine, is_value=is_value)


def _refuse_replay(engine: Any, *, is_value: bool) -> None:
    mode = replay_mode(engine)
    if mode == DISABLED:
        return
    is_flat = as_tree_config(engine.get("tree", None)).mode == "flat"
    is_reference = engine.get("forward_only", False)
    refuse_first(
        (is_value, f"{KEY}={mode} on a critic: only the actor's routes are recorded; set it to disabled"),
        (
            is_flat,
            f"{KEY}={mode} with tree.mode=flat (stock verl's FSDP engine does not replay): set tree.mode=tree",
        ),
        (
            is_reference and mode == RECORDED,
            f"{KEY}={mode} on a reference policy, which would record its own routes: set it to disabled",
        ),
    )


def refuse_ranks(num_ranks: int, engine: Any) -> None:
    """Check the sizes of groups of ranks, which verl would round down.

    Args:
        num_ranks: GPUs of the engine.
        engine: verl's `FSDPEngineConfig`.

    Raises:
        UnsupportedFeatureError: a size that does not divide their number; names the key.
    """
    sharded = engine.fsdp_size
    refuse_first(
        *(
            (
                num_ranks % size,
                f"fsdp_config.{name}={size} on {num_ranks} ranks: it must divide their number; set a size that does",
            )
            for name, size in (
                (SEQUENCE_PARALLEL, engine.ulysses_sequence_parallel_size),
                ("fsdp_size", sharded if 0 < sharded < num_ranks else 1),
            )
        )
    )


def _computed_dtype(engine: Any) -> str:
    """`mixed_precision.param_dtype` as verl's FSDP engine fills it in."""
    precision = engine.get("mixed_precision", None)
    return "bf16" if precision is None else str(precision.get("param_dtype", "bf16"))


def refuse_first(*refusals: tuple[Any, str]) -> None:
    """Refuse the first option that is asked for.

    Args:
        refusals: pairs of whether it is asked for (any true value) and the message: key, value, why, remedy.

    Raises:
        UnsupportedFeatureError: with that message.
    """
    for asked, message in refusals:
        if asked:
            raise UnsupportedFeatureError(f"the tree engine does not support {message}")


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
    _refuse_rows_with_images(data)
    if not ignores_routes:
        return
    if tu.get_non_tensor_data(data=data, key=FLAG, default=False):
        raise UnsupportedFeatureError(f"{FLAG}=True, but {KEY}=disabled; set actor_rollout_ref.actor.{KEY}")
    if COLUMN in data and is_actor:
        raise UnsupportedFeatureError(
            f"rows carry {COLUMN}, which {KEY}=disabled ignores; set actor_rollout_ref.actor.{KEY}=R3 to repeat "
            "them, or actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
        )


def _refuse_rows_with_images(data: TensorDict) -> None:
    """Rows of text may say of each token that it is text, and have its position on several axes."""
    remedy = "trees run rows of text; drop it, or set model_type=language_model"
    for row, inputs in enumerate(data.get("multi_modal_inputs", ())):
        given = tu.unwrap_non_tensor_data(inputs) or {}
        for key, value in given.items():
            if value is not None and not (key in TYPE_IDS and not torch.as_tensor(value).any()):
                raise UnsupportedFeatureError(f"row {row} carries multimodal inputs ({key}); {remedy}")
    if "position_ids" in data and data["position_ids"].dim() == 3:
        for row, position_AL in enumerate(data["position_ids"].unbind()):
            if not (position_AL == position_AL[:1]).all():
                raise UnsupportedFeatureError(
                    f"row {row} carries position_ids of images (its {len(position_AL)} axes differ); {remedy}"
                )
