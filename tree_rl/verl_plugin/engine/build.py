"""How a tree engine's module is built: verl's own builders, then tree attention, on CUDA and on a CPU."""

import dataclasses
import logging
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification
from transformers.utils import is_flash_attn_2_available

from tree_kernels.tree_attention import chosen_implementation, unavailable_reason
from tree_rl.models import check_model, use_edge_head, use_tree_attention
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.support import leaks_when_packed
from tree_rl.tree.cost import ModelShape
from tree_rl.verl_plugin.compat import (
    FSDPEngineWithLMHead,
    PrecisionType,
    get_device_name,
    get_init_weight_context_manager,
)
from tree_rl.verl_plugin.engine.features import refuse_flat_packing
from tree_rl.verl_plugin.engine.router_replay import DISABLED, replay_mode
from tree_rl.verl_plugin.options import AUTO, TreeConfig

logger = logging.getLogger(__name__)

LANGUAGE_MODEL = "language_model"
VALUE_MODEL = "value_model"
FLASH_ATTENTION = "flash_attention_2"
CPU_FLAT_ATTENTION = "sdpa"


class TreeReadingEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine whose module reads trees; its build chain is verl's own but for what follows."""

    stock_model_type: str
    """The name under which verl's builders know this kind of model."""
    engine_config: Any
    tree_config: TreeConfig
    vocab_size: int
    max_positions: int | None
    model_shape: ModelShape
    leaks_when_packed: bool
    """Whether rows see each other where stock verl packs them into one sequence; then rows that share nothing run as a
    forest, too."""
    self_check_error: float | None = None
    router_hooks: RouterHooks | None = None
    _plain_module: Any

    def initialize(self) -> None:
        """verl's initialisation, then whether tree attention can run as asked for.

        Raises:
            ValueError: `tree.attention` names an implementation that cannot run here.
        """
        super().initialize()
        wanted = {
            "device": torch.device(get_device_name()),
            "dtype": self._autocast_dtype,
            "head_size": self.model_shape.head_dim,
            "softcap": self._plain_module.config.get_text_config().to_dict().get("attn_logit_softcapping"),
            "deterministic": self.engine_config.full_determinism,
        }
        chosen = self.tree_config.attention
        if chosen == AUTO:
            chosen = chosen_implementation(**wanted)
        reason = unavailable_reason(chosen, **wanted)
        if reason is not None:
            raise ValueError(f"tree.attention={chosen} cannot run here: {reason}; set tree.attention=auto")
        logger.info("tree attention runs as %s", chosen)
        self.attention_implementation = chosen

    def _build_module(self) -> nn.Module:
        hf_config = self.model_config.hf_config
        if hf_config._attn_implementation == FLASH_ATTENTION and not flash_attention_works():
            logger.warning("flash-attn is not available: flat forwards use %s", CPU_FLAT_ATTENTION)
            hf_config._attn_implementation = CPU_FLAT_ATTENTION
        module: Any = super()._build_module() if self.stock_model_type == LANGUAGE_MODEL else self._build_value_module()
        check_model(module)
        self._plain_module = module
        self.leaks_when_packed = leaks_when_packed(module)
        refuse_flat_packing(self.leaks_when_packed, self.engine_config)
        attention, deterministic = self.tree_config.attention, self.engine_config.full_determinism
        flat = use_tree_attention(module, impl=attention, deterministic=deterministic)
        logger.info("tree attention over %s on %s", flat, type(module).__name__)
        if self.tree_config.router_aux_loss_coef is not None or replay_mode(self.engine_config) != DISABLED:
            self.router_hooks = RouterHooks(module)
        self.vocab_size = module.get_input_embeddings().num_embeddings
        shape = ModelShape.from_config(module.config.get_text_config().to_dict())
        self.model_shape = shape if self.stock_model_type == LANGUAGE_MODEL else dataclasses.replace(shape, vocab=1)
        self.max_positions = module.config.get_text_config().to_dict().get("max_position_embeddings")
        return module

    def _build_value_module(self) -> nn.Module:
        """verl's value model without its hard-wired flash attention."""
        config = self.model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = 0.0
        config.hidden_dropout = 0.0
        config.summary_dropout_prob = 0.0
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or "fp32")
        on_meta = not config.tie_word_embeddings
        with get_init_weight_context_manager(use_meta_tensor=on_meta, mesh=self.device_mesh)():
            module = AutoModelForTokenClassification.from_pretrained(
                self.model_config.local_path,
                dtype=dtype,
                config=config,
                attn_implementation=config._attn_implementation,
                trust_remote_code=self.model_config.trust_remote_code,
            )
        module.to(dtype)
        if self.model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """The sharded module, its head answering edge requests; adapters, which may wrap the head, are attached by now.

        verl offloads a forward-only model to pinned host memory; a machine without CUDA has none to pin.
        """
        if self.stock_model_type == LANGUAGE_MODEL:
            reason = use_edge_head(self._plain_module)
            logger.info("the head computes %s", "log-probs of edges" if reason is None else f"logits, for {reason}")
        config = self.engine_config
        offloads = config.forward_only or config.offload_policy
        if get_device_name() != "cpu" or not offloads:
            return super()._build_fsdp_module(module)
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        self._is_offload_param = self._is_offload_optimizer = False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


def flash_attention_works() -> bool:
    """Whether flash-attn is installed for a CUDA device that is present."""
    return torch.cuda.is_available() and is_flash_attn_2_available()
