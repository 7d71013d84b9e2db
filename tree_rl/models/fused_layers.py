"""Installs Liger's fused RMSNorm, rotary embedding, MLP and experts in one model, for verl's `model.use_liger`.

They act on each token separately, so they work on trees unchanged. Liger's own function also patches the modelling
module, which affects every other model of the process; this file undoes that.
"""

import inspect
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tree_kernels.triton_support import interpreted
from tree_rl.extras import install_command
from tree_rl.models.language_model import language_model
from tree_rl.models.support import UnsupportedModelError

PACKAGE = "liger_kernel"
KEY = "model.use_liger"
TESTED = frozenset(
    {
        *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"),
        *("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    }
)
"""Model types that are tested on trees with these layers."""
WITH_EXPERTS = frozenset({"qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_moe_text"})
"""Model types whose experts Liger replaces."""
SILU, TANH_GELU = frozenset({"silu", "swish"}), frozenset({"gelu_pytorch_tanh"})
"""Activations that Liger's MLPs compute, whatever the config says."""
ROTARY = "apply_rotary_pos_emb"
"""Function of a modelling module that its attention layers call by name."""
ROTARY_KERNEL = "LIGER_KERNEL_IMPL_ROPE", "nvidia-triton"
"""Variable by which Liger chooses the kernel of its rotary embedding, and the one that takes any number of tokens."""


def has_liger() -> bool:
    """True if liger-kernel is installed."""
    return find_spec(PACKAGE) is not None


def liger_unavailable_reason(device: torch.device) -> str | None:
    """Why Liger's layers cannot run on a device, or None if they can."""
    if not has_liger():
        return f"liger-kernel is not installed; {install_command(PACKAGE)}"
    if device.type != "cuda" and not interpreted():
        return f"Liger's kernels need a CUDA device, received {device}"
    return None


def check_liger(config: PretrainedConfig, *, device: torch.device, deterministic: bool = False) -> None:
    """Check, before the model is loaded, that Liger's layers compute the same as the model's own.

    Args:
        config: config of the model.
        device: device on which it will run.
        deterministic: require bitwise reproducible results.

    Raises:
        UnsupportedModelError: names the key, the reason and the remedy.
    """
    reason = why_not_liger(config, device=device, deterministic=deterministic)
    if reason is not None:
        raise UnsupportedModelError(f"{KEY}=true: {reason}; set {KEY}=false")


def why_not_liger(config: PretrainedConfig, *, device: torch.device, deterministic: bool = False) -> str | None:
    """The reason why `check_liger` would raise, or None."""
    return liger_unavailable_reason(device) or _family_reason(config, deterministic=deterministic)


def use_liger_layers(model: PreTrainedModel, *, device: torch.device, deterministic: bool = False) -> None:
    """Replace the layers of this model, and of no other model in the process.

    Args:
        model: before FSDP or PEFT wrap it; its head is not changed.
        device: device on which it will run; it may be on another one now.
        deterministic: require bitwise reproducible results.

    Raises:
        UnsupportedModelError: Liger's layers cannot run here, or compute something else than the model's own.
    """
    check_liger(model.config, device=device, deterministic=deterministic)
    # Where CUTLASS is installed, as flash-attn-4 needs it, Liger 0.8.5 would otherwise compile a kernel for each number
    # of tokens: about half a second a micro-batch.
    os.environ.setdefault(*ROTARY_KERNEL)
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    # The base model: Liger knows it for critics too, and cannot replace the tree's head by its fused loss.
    base: Any = language_model(model).base_model
    modelling = vars(sys.modules[type(base).__module__])
    stock = dict(modelling)
    try:
        # The same arguments as in verl's engine.
        _apply_liger_kernel_to_instance(model=base, fused_linear_cross_entropy=False, swiglu=True)
        rotary = modelling[ROTARY]
    finally:
        modelling.update(stock)
    if rotary is not stock[ROTARY]:
        _rotate_by(rotary, modelling, base.layers)


def remove_liger_layers(model: nn.Module) -> None:
    """Restore the model's own layers."""
    for module in model.modules():
        own = vars(module)
        if "forward" in own and own["forward"].__module__.startswith(PACKAGE):
            for name in ("forward", "extra_repr", "_get_name"):
                own.pop(name, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_enter, _leave)]:
                del hooks[key]


def _family_reason(config: PretrainedConfig, *, deterministic: bool) -> str | None:
    """Why Liger's layers would not compute the same as the model's own, or None."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    config = config.get_text_config()
    family, settings = config.model_type, config.to_dict()
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return f"liger-kernel has no layers for model_type={family}"
    if family not in TESTED:
        return f"trees are not tested with liger-kernel's layers for model_type={family} (tested: {sorted(TESTED)})"
    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[family]).parameters
    computed = TANH_GELU if "geglu" in parameters else SILU
    key = "hidden_activation" if settings.get("hidden_activation") else "hidden_act"
    if settings.get(key) not in computed:
        return f"liger-kernel computes {' or '.join(sorted(computed))}, the model {key}={settings.get(key)}"
    if family == "qwen3_moe" and (settings["mlp_only_layers"] or settings["decoder_sparse_step"] != 1):
        return "liger-kernel expects experts in every layer, and mlp_only_layers or decoder_sparse_step leave some out"
    if deterministic and family in WITH_EXPERTS:
        return "liger-kernel's experts add router gradients in any order, which breaks fsdp_config.full_determinism"
    return None


_IN_FUSED_LAYER = ContextVar("_IN_FUSED_LAYER", default=False)
"""True while this thread runs a layer with Liger's rotary embedding."""


class _RotaryOfLayer:
    """Replaces a modelling module's rotary embedding: calls Liger's in patched layers, the original elsewhere."""

    def __init__(self, stock: Callable[..., Any], fused: Callable[..., Any]) -> None:
        self._stock, self._fused = stock, fused

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._fused if _IN_FUSED_LAYER.get() else self._stock)(*args, **kwargs)


def _rotate_by(rotary: Callable[..., Any], modelling: dict[str, Any], layers: nn.ModuleList) -> None:
    if not isinstance(modelling[ROTARY], _RotaryOfLayer):
        modelling[ROTARY] = _RotaryOfLayer(modelling[ROTARY], rotary)
    for layer in layers:
        layer.register_forward_pre_hook(_enter)
        # Recomputation stops early by an exception inside the layer; the hook must run then too.
        layer.register_forward_hook(_leave, always_call=True)


def _enter(*_: object) -> None:
    _IN_FUSED_LAYER.set(True)


def _leave(*_: object) -> None:
    _IN_FUSED_LAYER.set(False)
