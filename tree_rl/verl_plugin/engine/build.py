"""How a tree engine's module is built: verl's own builders, then tree attention, on CUDA and on a CPU."""

import copy
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForTokenClassification
from transformers.utils import is_flash_attn_2_available

from tree_kernels.tree_attention import chosen_implementation, unavailable_reason
from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.model import MemoryModel
from tree_rl.models import check_model, use_tree_attention
from tree_rl.training.memory.reading import read_memory_model
from tree_rl.training.options import AUTO, TreeOptions
from tree_rl.verl_plugin.compat import (
    FSDPEngineWithLMHead,
    PrecisionType,
    get_device_name,
    get_init_weight_context_manager,
)

logger = logging.getLogger(__name__)

FLASH_ATTENTION = "flash_attention_2"
CPU_FLAT_ATTENTION = "sdpa"


def choose_flat_attention(hf_config: Any) -> None:
    """Let rows without a tree run SDPA where flash-attn, verl's default, is not available."""
    if hf_config._attn_implementation == FLASH_ATTENTION and not flash_attention_works():
        logger.warning("flash-attn is not available: flat forwards use %s", CPU_FLAT_ATTENTION)
        hf_config._attn_implementation = CPU_FLAT_ATTENTION


def flash_attention_works() -> bool:
    """Whether flash-attn is installed for a CUDA device that is present."""
    return torch.cuda.is_available() and is_flash_attn_2_available()


def let_module_read_trees(module: Any, options: TreeOptions, *, deterministic: bool) -> None:
    """Put tree attention into a built module.

    Raises:
        UnsupportedModelError: a model that trees cannot run exactly.
    """
    check_model(module)
    flat = use_tree_attention(module, impl=options.attention, deterministic=deterministic)
    logger.info("tree attention over %s on %s", flat, type(module).__name__)


def chosen_attention(
    module: Any, options: TreeOptions, *, dtype: torch.dtype, head_size: int, deterministic: bool
) -> str:
    """The implementation of tree attention that runs.

    Raises:
        ValueError: `tree.attention` names one that cannot run here.
    """
    wanted: dict[str, Any] = {
        "device": torch.device(get_device_name()),
        "dtype": dtype,
        "head_size": head_size,
        "softcap": text_settings(module).get("attn_logit_softcapping"),
        "deterministic": deterministic,
    }
    chosen = chosen_implementation(**wanted) if options.attention == AUTO else options.attention
    reason = unavailable_reason(chosen, **wanted)
    if reason is not None:
        raise ValueError(f"tree.attention={chosen} cannot run here: {reason}; set tree.attention=auto")
    return chosen


def shape_of(module: Any, *, is_critic: bool) -> ModelShape:
    """Sizes of a built model; the head of a critic has one row."""
    shape = ModelShape.from_config(text_settings(module))
    return dataclasses.replace(shape, vocab=1) if is_critic else shape


def memory_model(module: Any, shape: ModelShape, *, dtype: torch.dtype) -> MemoryModel | None:
    """What a built model's forward and backward keep alive on a GPU; None on a CPU, where nobody runs out of it."""
    device = torch.device(get_device_name())
    return read_memory_model(module, shape, dtype=dtype, device=device) if device.type == "cuda" else None


def text_settings(module: Any) -> dict[str, Any]:
    """The text model's config."""
    settings: dict[str, Any] = module.config.get_text_config().to_dict()
    return settings


def build_value_module(model_config: Any, engine_config: Any, device_mesh: Any) -> nn.Module:
    """verl's value model without its hard-wired flash attention."""
    config = model_config.hf_config
    config.num_labels = 1
    config.classifier_dropout = 0.0
    config.hidden_dropout = 0.0
    config.summary_dropout_prob = 0.0
    dtype = PrecisionType.to_dtype(engine_config.model_dtype or "fp32")
    on_meta = not config.tie_word_embeddings
    with get_init_weight_context_manager(use_meta_tensor=on_meta, mesh=device_mesh)():
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


@contextmanager
def without_stock_liger(engine: FSDPEngineWithLMHead) -> Iterator[None]:
    """verl's own way to Liger's layers changes the modelling file, and with it every model of the process."""
    config = engine.model_config
    engine.model_config = copy.copy(config)
    vars(engine.model_config)["use_liger"] = False
    try:
        yield
    finally:
        engine.model_config = config


@contextmanager
def without_stock_sequence_parallel(engine: FSDPEngineWithLMHead) -> Iterator[None]:
    """verl's own Ulysses asks for key-value heads that divide, and slices the inputs of some models; trees do not."""
    size, engine.ulysses_sequence_parallel_size = engine.ulysses_sequence_parallel_size, 1
    try:
        yield
    finally:
        engine.ulysses_sequence_parallel_size = size


@contextmanager
def without_pinned_offload(engine: FSDPEngineWithLMHead) -> Iterator[None]:
    """verl offloads a forward-only model to pinned host memory; a machine without CUDA has none to pin."""
    config = engine.engine_config
    if get_device_name() != "cpu" or not (config.forward_only or config.offload_policy):
        yield
        return
    engine.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
    engine._is_offload_param = engine._is_offload_optimizer = False
    try:
        yield
    finally:
        engine.engine_config = config


def moments_to_come(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of Adam's two moments on this rank, which come with the first optimizer step only."""
    if optimizer.state:
        return 0
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    local = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in trained]
    return sum(2 * parameter.numel() * parameter.element_size() for parameter in local)
