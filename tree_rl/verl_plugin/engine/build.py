"""Builds a tree engine's module on CUDA and on a CPU: verl's builders, then tree attention."""

import copy
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForTokenClassification
from transformers.utils import is_flash_attn_2_available

from tree_kernels.tree_attention import chosen_implementation, unavailable_reason
from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.model import MemoryModel
from tree_rl.models.flat_attention import needs_eager
from tree_rl.models.fused_layers import check_liger, why_not_liger
from tree_rl.models.language_model import is_wrapper, language_model
from tree_rl.models.support import leaks_when_packed
from tree_rl.models.value_head import prepare_value_config
from tree_rl.training.memory.memory_of_module import read_memory_model
from tree_rl.training.memory_budget import device_bytes_of
from tree_rl.training.ranks.recovery import has_run
from tree_rl.training.tree_options import AUTO, TreeOptions
from tree_rl.verl_plugin import compat

logger = logging.getLogger(__name__)

FLASH_ATTENTION = "flash_attention_2"
SDPA, EAGER = "sdpa", "eager"


def choose_flat_attention(hf_config: Any) -> None:
    """Choose the attention of rows without a tree: flash-attn (verl's default), SDPA or eager, by what works here."""
    asked = hf_config._attn_implementation
    has_flash_attention = torch.cuda.is_available() and is_flash_attn_2_available()
    if asked not in (FLASH_ATTENTION, SDPA) or (asked == FLASH_ATTENTION and has_flash_attention):
        return
    chosen = EAGER if needs_eager(hf_config) else SDPA
    if chosen != asked:
        why = "flash-attn is not available" if asked == FLASH_ATTENTION else "SDPA has no soft-caps and no sinks"
        logger.warning("%s: flat forwards use %s", why, chosen)
        hf_config._attn_implementation = chosen


def runs_as_forests(module: Any, flat_attention: str) -> bool:
    """True if rows that share nothing must run as a forest too.

    Packed by verl they would attend to each other, or eager attention would need memory quadratic in all their tokens.
    """
    return leaks_when_packed(module) or (flat_attention == EAGER and needs_eager(module.config))


def chosen_attention(
    module: Any, options: TreeOptions, *, dtype: torch.dtype, shape: ModelShape, deterministic: bool
) -> str:
    """The implementation of tree attention. Raises `ValueError` if `tree.attention` names one that cannot run here."""
    wanted: dict[str, Any] = {
        "device": torch.device(compat.get_device_name()),
        "dtype": dtype,
        "head_size": shape.head_dim,
        "value_size": shape.value_size,
        "softcap": text_settings(module).get("attn_logit_softcapping"),
        "deterministic": deterministic,
    }
    chosen = chosen_implementation(**wanted) if options.attention == AUTO else options.attention
    reason = unavailable_reason(chosen, **wanted)
    if reason is not None:
        raise ValueError(f"tree.attention={chosen} cannot run here: {reason}; set tree.attention=auto")
    return chosen


def shape_of(module: Any, *, is_critic: bool) -> ModelShape:
    """Sizes of a built model; a critic's head has one row."""
    shape = ModelShape.from_config(text_settings(module))
    return dataclasses.replace(shape, vocab=1) if is_critic else shape


def memory_model(module: Any, shape: ModelShape, *, dtype: torch.dtype) -> MemoryModel | None:
    """Model of the GPU memory of a built model's forward and backward; None on a CPU."""
    device = torch.device(compat.get_device_name())
    return read_memory_model(module, shape, dtype=dtype, device=device) if device.type == "cuda" else None


def text_settings(module: Any) -> dict[str, Any]:
    """The text model's config."""
    settings: dict[str, Any] = module.config.get_text_config().to_dict()
    return settings


def build_value_module(model_config: Any, engine_config: Any, device_mesh: Any) -> nn.Module:
    """verl's value model without its hard-coded flash attention, also for families for which verl needs TRL."""
    config = model_config.hf_config
    prepare_value_config(config)
    dtype = compat.PrecisionType.to_dtype(engine_config.model_dtype or "fp32")
    on_meta = not config.tie_word_embeddings
    with compat.get_init_weight_context_manager(use_meta_tensor=on_meta, mesh=device_mesh)():
        module: Any = AutoModelForTokenClassification.from_pretrained(
            model_config.local_path,
            dtype=dtype,
            config=config,
            attn_implementation=config._attn_implementation,
            trust_remote_code=model_config.trust_remote_code,
        )
    module.to(dtype)
    if model_config.enable_gradient_checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    built: nn.Module = module
    return built


def uses_liger(model_config: Any, *, device: torch.device, deterministic: bool) -> bool:
    """True if a model gets Liger's layers: with `auto`, the value in config/machine/*.yaml, where it supports them.

    Raises an UnsupportedModelError if they cannot run with `use_liger=true`.
    """
    if model_config.use_liger == AUTO:
        reason = why_not_liger(model_config.hf_config, device=device, deterministic=deterministic)
        if reason is not None and torch.distributed.get_rank() == 0:
            logger.warning("model.use_liger=auto: the model keeps its own layers, as %s", reason)
        return reason is None
    if model_config.use_liger:
        check_liger(model_config.hf_config, device=device, deterministic=deterministic)
    return bool(model_config.use_liger)


@contextmanager
def replaced(engine: compat.FSDPEngineWithLMHead, **attributes: Any) -> Iterator[None]:
    """Give an engine other attributes while one of verl's builders runs."""
    before = {name: getattr(engine, name) for name in attributes}
    vars(engine).update(attributes)
    try:
        yield
    finally:
        vars(engine).update(before)


def without_liger(model_config: Any) -> Any:
    """A config without verl's use of Liger's layers, which patches the modelling file and so every model of the
    process."""
    config = copy.copy(model_config)
    vars(config)["use_liger"] = False
    return config


def without_pinned_offload(engine_config: Any) -> Any:
    """On a CPU, a config without verl's offload of a forward-only model to pinned host memory, which needs CUDA."""
    if compat.get_device_name() != "cpu" or not (engine_config.forward_only or engine_config.offload_policy):
        return engine_config
    return dataclasses.replace(engine_config, forward_only=False, offload_policy=False)


def without_nested_shards(engine_config: Any, module: nn.Module) -> Any:
    """A config without the layer classes that contain an embedding (image towers) or another sharded layer (Zamba 2).

    verl shards untied embeddings separately, and FSDP2 cannot shard a weight twice.
    """
    policy = dict(engine_config.wrap_policy or {})
    layers = sorted(getattr(module, "_no_split_modules", None) or ())
    together = {
        type(layer).__name__
        for layer in module.modules()
        if type(layer).__name__ in layers
        for part in layer.modules()
        if isinstance(part, nn.Embedding) or (type(part).__name__ in layers and part is not layer)
    }
    if policy.get("transformer_layer_cls_to_wrap") or not together:
        return engine_config
    policy["transformer_layer_cls_to_wrap"] = [layer for layer in layers if layer not in together]
    return dataclasses.replace(engine_config, wrap_policy=policy)


def reduce_what_never_ran(module: nn.Module) -> None:
    """Keep gradient synchronisation on where a module has never run, such as an image tower among rows of text.

    Such a module has nothing to reduce. Without synchronisation FSDP2 asks after each backward whether its gradients
    have another dtype than they are reduced in, and fails on weights that were never gathered. In float32 it does not
    ask.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule) and not has_run(part):
            part.set_requires_gradient_sync(True, recurse=False)


def zero_gradients_of_towers(module: nn.Module) -> None:
    """After a backward, set gradients of zero for parts that rows of text do not use, as in stock verl.

    For families whose forward verl replaces, it runs these parts on an empty image, so that all ranks gather the same
    weights; AdamW then also decays them. In other families they have no gradient, in verl as here.
    """
    untyped: Any = module
    if not is_wrapper(module) or not type(untyped.base_model).forward.__module__.startswith("verl."):
        return
    read = {id(parameter) for parameter in language_model(module).parameters()}
    for parameter in untyped.base_model.parameters():
        if parameter.requires_grad and parameter.grad is None and id(parameter) not in read:
            parameter.grad = torch.zeros_like(parameter)


def moments_to_come(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of Adam's two moments on this rank's device that the first optimizer step will allocate; 0 after it."""
    if optimizer.state:
        return 0
    return 2 * device_bytes_of([parameter for parameter in module.parameters() if parameter.requires_grad])
