"""Checks, before training starts, whether a tree can run a model exactly; other models are refused."""

from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification

from tree_kernels.tree_causal_conv1d import ACTIVATIONS
from tree_rl.models.dropout import dropout_reasons
from tree_rl.models.language_model import is_wrapper, language_model
from tree_rl.models.logits_rule import find_logits_rule
from tree_rl.models.recurrent.layers import KINDS, kind_of, readable_layer_types
from tree_rl.models.router_noise import noise_reasons
from tree_rl.models.stock_windows import find_stock_windows

READABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
RECURRENT_MIXERS = (
    "Mixer",
    "MambaLayer",
    "ShortConv",
    "DeltaNet",
    "DeltaAttention",
    "LightningAttention",
    "Rglru",
    "RwkvSelfAttention",
)
"""Suffixes of the class names of recurrent layers."""
BLIND_MASKS = frozenset({"gpt_oss", "afmoe"})
"""Model types whose masks transformers builds without looking at positions."""
COUNTS_FROM_PADDING = "create_position_ids_from_input_ids"
"""Method of modules that count positions from `padding_idx` + 1 unless they are given (Kosmos-2.5)."""
OWN_MASKS = {
    "index_topk": "a sparse indexer, which lets each token see some tokens only",
    "keep_window_size": "a dynamic mask, which lets each token see some tokens only",
}
"""Config keys of masks that are neither causal nor sliding, with a description."""


class UnsupportedModelError(ValueError):
    """A tree run of this model would differ from running its rows alone."""


def check_model(model: PreTrainedModel) -> None:
    """Refuse models that a tree cannot run exactly.

    Args:
        model: a Hugging Face causal language model or token classifier, before any wrapping.

    Raises:
        UnsupportedModelError: names the model type, the offending setting and the remedy.
    """
    _refuse(model, _reasons(model))


def check_dropout(model: nn.Module) -> None:
    """Refuse a model with dropout, as `check_model` does, but including the adapters that wrap it.

    Raises:
        UnsupportedModelError: names each key.
    """
    _refuse(model, dropout_reasons(model))


def leaks_when_packed(model: PreTrainedModel) -> bool:
    """True if rows that are packed into one sequence, as in stock verl, see each other in this model.

    That happens with recurrent layers, and if transformers builds the mask without positions, so that it cannot
    separate packed rows; flash attention reads positions itself. Models with several rotary axes read row starts only
    from positions with four axes.
    """
    config = language_model(model).config
    is_blind = config.model_type in BLIND_MASKS and "flash" not in config._attn_implementation
    return is_blind or has_recurrent_layers(model) or has_rope_axes(model)


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """True if the model has recurrent layers that can read trees."""
    return bool(readable_layer_types(language_model(model)))


def has_rope_axes(model: PreTrainedModel) -> bool:
    """True if tokens have several rotary positions; given only one, such a model uses it on all axes, as for text."""
    return any("mrope_section" in one for one in _ropes(language_model(model).config.to_dict()))


def has_absolute_positions(model: PreTrainedModel) -> bool:
    """True if a model uses absolute positions (an embedding table or a scale) besides relative rotary ones."""
    model = language_model(model)
    tables = (name.rpartition(".")[2] for name, _ in model.named_modules())
    settings = model.config.to_dict()
    rope = settings.get("rope_parameters") or {}
    scales = settings.get("attn_temperature_tuning") or rope.get("llama_4_scaling_beta")
    return bool(scales) or any(name == "wpe" or name.startswith(("embed_position", "position_emb")) for name in tables)


def _refuse(model: nn.Module, reasons: list[str]) -> None:
    if reasons:
        config = getattr(model, "config", None)
        family = "" if config is None else f" (model_type={config.model_type})"
        raise UnsupportedModelError(f"{type(model).__name__}{family} cannot train on trees: {'; '.join(reasons)}")


def _reasons(model: PreTrainedModel) -> list[str]:
    reasons = _wrapper_reasons(model)
    if reasons:
        return reasons
    override = "model.override_config" + (".text_config" if is_wrapper(model) else "")
    whole, model = model, language_model(model)
    settings = model.config.to_dict()
    layer_types = list(settings.get("layer_types") or ())
    recurrent = readable_layer_types(model)
    # Qwen3-Next, Qwen3.5 and Bamba use the interface although they do not declare it.
    if not (model._supports_attention_backend or recurrent):
        reasons.append("its attention does not go through transformers' attention interface")
    readable = READABLE_LAYERS | recurrent
    odd_layers = sorted(set(layer_types) - readable)
    if odd_layers:
        reasons.append(f"layer types {odd_layers} carry state along the sequence; readable are {sorted(readable)}")
    reasons += _recurrence_reasons(model)
    own_masks = [f"{key}={settings[key]} is {what}" for key, what in OWN_MASKS.items() if settings.get(key)]
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        own_masks.append("it attends in both directions")
    reasons += [f"{mask}; tree attention is causal or sliding" for mask in own_masks[:1]]
    if settings.get("cross_attention_layers"):
        reasons.append("some of its layers attend to images alone (cross_attention_layers)")
    reasons += _position_reasons(model, settings) + dropout_reasons(whole) + _router_reasons(model, override)
    if reasons:
        return reasons
    windows = find_stock_windows(model)
    return [windows] if isinstance(windows, str) else []


def _wrapper_reasons(model: PreTrainedModel) -> list[str]:
    """Why text rows cannot run on the language model inside a multimodal model."""
    if not is_wrapper(model):
        return []
    generator = model if model.get_output_embeddings() is not None else _generator(model)
    if generator is None:
        return ["verl loads it without a head for tokens"]
    if language_model(generator) is generator.base_model:
        return ["it has no separate language model besides its other parts"]
    rule = find_logits_rule(generator)
    return [f"rows of text do not run on its language model alone: {rule}"] if isinstance(rule, str) else []


def _generator(critic: PreTrainedModel) -> PreTrainedModel | None:
    """The generative model, without weights, with a critic's config; None if `critic` is not a critic."""
    generator = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(critic.config), None)
    if generator is None or not isinstance(critic, GenericForTokenClassification):
        return None
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(critic.config)


def _router_reasons(model: PreTrainedModel, override: str) -> list[str]:
    """Settings of Mixture-of-Experts routers that a tree does not support."""
    reasons = noise_reasons(model, override)
    if model.config.to_dict().get("output_router_logits"):
        reasons.append(
            "the model's own router auxiliary loss counts unique tokens, not rows (and verl would drop it); set "
            f"{override}.output_router_logits=False, and tree.router_aux_loss_coef for the loss over rows"
        )
    return reasons


def _recurrence_reasons(model: PreTrainedModel) -> list[str]:
    """Recurrent mixers and sequence convolutions that cannot read trees."""
    reasons = []
    readable: dict[str, Any] = {name: m for name, m in model.named_modules() if kind_of(m) is not None}
    for name, mixer in readable.items():
        activation = getattr(mixer, "activation", None)
        if activation not in ACTIVATIONS:
            reasons.append(f"{name} applies {activation} to its convolution; trees read silu and swish")
            break
    inside = [name + "." for name in readable]
    others = [(n, m) for n, m in model.named_modules() if not any((n + ".").startswith(prefix) for prefix in inside)]
    mixers = [(n, type(m).__name__) for n, m in others if type(m).__name__.endswith(RECURRENT_MIXERS)]
    if mixers:
        known = ", ".join(sorted(name for kind in KINDS for name in kind.mixers))
        reasons.append(
            f"{mixers[0][0]} is a {mixers[0][1]}, whose state is not followed along trees; recurrent layers that are: "
            f"{known} (in transformers >=5.5.3,<5.11)"
        )
    convolutions = [n for n, m in others if isinstance(m, nn.Conv1d)]
    if convolutions:
        reasons.append(f"convolution over the sequence in {convolutions[0]}")
    return reasons


def _position_reasons(model: PreTrainedModel, settings: dict[str, object]) -> list[str]:
    """Settings that depend on more than a token's position in its row."""
    kinds = [one.get("rope_type", one.get("type")) for one in _ropes(settings)]
    reasons = [
        f"rope_type={kind} depends on the longest row of a batch" for kind in kinds if kind in LENGTH_DEPENDENT_ROPE
    ]
    tuned = [m for m in model.modules() if getattr(m, "attn_temperature_tuning", False)]
    if any(not getattr(module, "use_rope", True) for module in tuned):
        reasons.append(
            "attn_temperature_tuning=True scales queries of layers without rotary positions by the number of tokens "
            "before them in the batch; train on rows with model_type=language_model"
        )
    if any(hasattr(module, COUNTS_FROM_PADDING) for module in model.modules()):
        reasons.append(
            "rows alone start at position padding_idx + 1, those of a tree at 0; train on rows with "
            "model_type=language_model"
        )
    return reasons


def _ropes(settings: dict[str, object]) -> list[dict[str, object]]:
    """Rotary settings: one dict, or one per layer type."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return []
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]
