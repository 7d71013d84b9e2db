"""Checks a model before Ray starts: builds it from its config without weights, and checks it as the workers do."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import AutoConfig, AutoModelForTokenClassification, PretrainedConfig

from tree_rl.inspection.files.quoting import escaped
from tree_rl.models import UnsupportedModelError, check_model
from tree_rl.models.fused_layers import why_not_liger
from tree_rl.models.images import IMAGE_READERS
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel_support import KEY as SEQUENCE_PARALLEL
from tree_rl.models.support import check_dropout, has_recurrent_layers, has_rope_axes
from tree_rl.models.value_head import prepare_value_config
from tree_rl.training.tree_options import AUTO
from tree_rl.verl_plugin.compat import get_hf_auto_model_class, update_model_config
from tree_rl.verl_plugin.engine.router_replay import RouterReplay
from tree_rl.verl_plugin.options import DISABLED, as_tree_config, replay_mode
from tree_rl.verl_plugin.refusals.refusal import Of
from tree_rl.verl_plugin.refusals.table import refuse_if_unsupported

IMAGE_KEYS = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}
"""verl's default column names, by the key of `data` that names the column."""
TEXT_ALONE = "trees run rows of text"
TEXT_LOOPS = ("tree_gateway_agent", "tree_tool_agent")
"""Agent loops whose agents get a sample's text; they may send images of their own."""
ADAPTED = ("target_modules", "target_parameters", "exclude_modules")
"""Keys of a role's `model` node that choose the modules with adapters."""


def refuse_model_of_job(
    model: DictConfig,
    *,
    key: str,
    engines: Mapping[str, Any] | None = None,
    is_value: bool = False,
    rollout: str | None = None,
) -> None:
    """Refuse a model on this machine that trees cannot run exactly, or not with a role's options.

    Does not check a hub's model that is not in the local cache, or a model with custom code; the workers do.

    Args:
        engines: FSDP options, by their key, of each engine that runs the model on trees.
        rollout: `rollout.name` of a job that generates.

    Raises:
        ValueError: names key, path, reason and remedy.
    """
    config = _read_config(model, key)
    if config is None:
        return
    named = f"{key}.path={model.path}: "
    built: Any = _built(config, is_value=is_value, named=named)
    if built is None:
        return
    try:
        check_model(built)
        refuse_if_unsupported({"name": rollout, "recurrent": has_recurrent_layers(built)}, "", Of.GENERATION)
        for engine_key, engine in (engines or {}).items():
            _check_engine(built, engine, engine_key)
    except ValueError as error:
        raise type(error)(named + str(error)) from None
    if model.get("use_liger", False) is True:
        # For CUDA, because the GPUs may be on another machine.
        reason = why_not_liger(config, device=torch.device("cuda"))
        if reason is not None:
            raise UnsupportedModelError(f"{named}{key}.use_liger=true: {reason}; set {key}.use_liger=false")
    if model.get("lora_rank", 0) > 0:
        _check_adapters(built, model, key)


def choose_layers(config: DictConfig, role: str) -> str | None:
    """Replace a role's `use_liger=auto` by true or false, as verl's servers of vLLM and SGLang take nothing else.

    Returns a note why the model keeps its own layers, or None.
    """
    model, engine = config[role].model, "critic.fsdp" if role == "critic" else "actor_rollout_ref.actor.fsdp_config"
    if model.get("use_liger", None) != AUTO:
        return None
    path = model.get("hf_config_path", None) or model.path
    try:
        read = AutoConfig.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code", False)))
    except (OSError, ValueError) as error:
        reason: str | None = f"its config cannot be read here: {error}"
    else:
        is_deterministic = bool(OmegaConf.select(config, f"{engine}.full_determinism"))
        # For CUDA, because the GPUs may be on another machine.
        reason = why_not_liger(read, device=torch.device("cuda"), deterministic=is_deterministic)
    model.use_liger = reason is None
    return None if reason is None else f"{role}.model.use_liger=false, as {reason}"


def load_before_images(config: DictConfig) -> str | None:
    """Let vLLM read the weights of a model with images when it starts, which verl's `load_format=dummy` spares.

    vLLM 0.30 keeps mean and deviation of pixels in buffers (Qwen2-VL and Qwen2.5-VL). A start without weights fills
    these with noise, and no weight update replaces it. Other families and versions may have such buffers too. Returns a
    note, or None if nothing changed.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or "dummy" not in rollout.load_format:
        return None
    read = _read_config(model, "actor_rollout_ref.model")
    if read is None or read.model_type not in IMAGE_READERS:
        return None
    rollout.load_format = "auto"
    return "actor_rollout_ref.rollout.load_format=auto, as vLLM may normalise images by noise without weights"


def _read_config(model: DictConfig, key: str) -> PretrainedConfig | None:
    """The model's config with the user's overrides; None if this machine does not have it."""
    given = str(model.get("hf_config_path", None) or model.path)
    path = Path(given).expanduser()
    if "://" in given:
        return None
    try:
        settings, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
        if "auto_map" in settings:
            return None
        config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        if (path / "config.json").exists():
            raise ValueError(f"{key}.path={model.path}: transformers cannot read its config.json: {error}") from error
        return None
    overrides = model.get("override_config", None) or {}
    if isinstance(overrides, DictConfig):
        overrides = OmegaConf.to_container(overrides, resolve=True)
    update_model_config(config, override_config_kwargs=overrides.get("model_config", overrides))
    read: PretrainedConfig = config
    return read


def _built(config: Any, *, is_value: bool, named: str) -> Any:
    """The model without weights; None if it cannot be built without them."""
    if not is_value and not config.architectures:
        raise ValueError(
            f"{named}its config.json has no architectures, by which verl chooses the class; save the model again with "
            "save_pretrained"
        )
    try:
        if is_value:
            prepare_value_config(config)
        auto_class = AutoModelForTokenClassification if is_value else get_hf_auto_model_class(config)
        with torch.device("meta"):
            return auto_class.from_config(config, attn_implementation="eager")
    except (ValueError, ImportError) as error:
        raise ValueError(f"{named}transformers cannot build it: {error}") from error
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError):
        return None


def _check_engine(built: Any, engine: Any, key: str) -> None:
    tree = as_tree_config(engine.get("tree", None))
    mode = replay_mode(engine)
    # Masks without positions only matter for SDPA, which the workers choose.
    refuse_if_unsupported({"leaks": has_recurrent_layers(built) or has_rope_axes(built), "tree": tree}, key, Of.PACKING)
    refuse_if_unsupported({SEQUENCE_PARALLEL: engine.get(SEQUENCE_PARALLEL, 1), "config": built.config}, key, Of.HEADS)
    if tree.router_aux_loss_coef is not None or mode != DISABLED:
        hooks = RouterHooks(built)
        hooks.check_auxiliary_loss(tree.router_aux_loss_coef)
        if mode != DISABLED:
            RouterReplay(hooks, mode)


def _check_adapters(built: Any, model: DictConfig, key: str) -> None:
    """Attach adapters as verl does, without their weights, and check them as the engine does."""
    path = model.get("lora_adapter_path", None)
    if path is not None and not Path(path).expanduser().is_dir():
        return
    asked = OmegaConf.to_container(OmegaConf.masked_copy(model, [name for name in ADAPTED if name in model]))
    assert isinstance(asked, dict)
    try:
        if path is None:
            adapters: PeftConfig = LoraConfig(task_type="CAUSAL_LM", r=model.lora_rank, bias="none", **asked)
        else:
            adapters = PeftConfig.from_pretrained(str(Path(path).expanduser()))
        wrapped = get_peft_model(built, adapters)
    except (ValueError, re.error) as error:
        said = escaped(" ".join(str(error).split()), 300)
        raise ValueError(f"{key}.target_modules={asked.get('target_modules')}: {said}") from error
    check_dropout(wrapped)
    refuse_if_unsupported(built, key, Of.ADAPTERS)


def why_no_images(config: DictConfig) -> str | None:
    """Why rows of a job that samples cannot have images; None if they can, or if only workers can tell."""
    key, rollout = "actor_rollout_ref.model", config.actor_rollout_ref.rollout
    model = _read_config(config.actor_rollout_ref.model, key)
    if model is not None and model.model_type not in IMAGE_READERS:
        return TEXT_ALONE
    loop = OmegaConf.select(rollout, "agent.default_agent_loop")
    return f"agents of {loop} get a sample's text alone" if loop in TEXT_LOOPS else None


def refuse_rows_with_images(data: DictConfig, *, why: str | None = TEXT_ALONE) -> None:
    """Refuse parquet files on this machine, of the node `data`, whose rows contain images, videos or audio.

    `why` is None if rows can have images. Raises a ValueError that names the key, the file, the row and its column.
    """
    refused = {key: name for key, name in IMAGE_KEYS.items() if why is not None or key != "image_key"}
    columns = [str(data.get(key, None) or default) for key, default in refused.items()]
    for key in ("train_files", "val_files"):
        given = data.get(key, None) or ()
        for path in [given] if isinstance(given, str) else given:
            file = Path(str(path)).expanduser()
            if file.suffix == ".parquet" and file.exists():
                _refuse_file(file, columns, f"data.{key}={path}", why or TEXT_ALONE)


def _refuse_file(file: Path, columns: Sequence[str], named: str, why: str) -> None:
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid:
        # The data set will report what is wrong.
        return
    row = 0
    for batch in parquet.iter_batches(batch_size=64, columns=[c for c in columns if c in parquet.schema_arrow.names]):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            # An empty list or null is no image.
            for offset, value in enumerate(column):
                if value.is_valid and (not hasattr(value, "values") or len(value)):
                    raise ValueError(
                        f"{named}: row {row + offset} has {name}; {why}: drop such rows, or "
                        "train without trees (actor_rollout_ref.model.model_type=language_model and verl's trainer)"
                    )
        row += len(batch)
