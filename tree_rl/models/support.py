"""Which models a tree can run exactly. Whatever cannot be exact is refused by name before training starts."""

from torch import nn
from transformers import PreTrainedModel

from tree_rl.models.dropout import dropout_reasons
from tree_rl.models.recurrent.layers import GATED_DELTA_NET, KINDS, kind_of, layers_of, readable_layer_types

READABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
MULTIMODAL_KEYS = ("vision_config", "audio_config", "speech_config")
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
"""Endings of the class names of layers that carry state along the sequence."""
BLIND_MASKS = frozenset({"gpt_oss", "afmoe"})
"""Model types whose masks transformers builds without positions."""


OWN_MASKS = {
    "index_topk": "a sparse indexer, which lets each token see some tokens only",
    "keep_window_size": "a dynamic mask, which lets each token see some tokens only",
}
"""Keys of a config that give attention another mask than the causal or sliding one, and what it is."""

ENCODERS = ("vision", "visual", "audio")
"""Parts of module names of what reads images and sound."""


class UnsupportedModelError(ValueError):
    """A model whose tree run would differ from its rows run alone."""


def check_model(model: PreTrainedModel) -> None:
    """Refuse models that a tree cannot run exactly.

    Args:
        model: a Hugging Face causal language model or token classifier, before any wrapping.

    Raises:
        UnsupportedModelError: names the model type, the offending setting and the remedy.
    """
    _refuse(model, _reasons(model))


def check_dropout(model: nn.Module) -> None:
    """Refuse a model that draws dropout masks, as `check_model` does; adapters that wrap it may bring some.

    Raises:
        UnsupportedModelError: names each key.
    """
    _refuse(model, dropout_reasons(model))


def leaks_when_packed(model: PreTrainedModel) -> bool:
    """Whether rows packed into one sequence, as stock verl runs them, see each other in this model.

    They do where a layer carries a state along the sequence, and where transformers does not tell the mask at which
    positions rows begin; flash attention reads positions itself.
    """
    is_blind = model.config.model_type in BLIND_MASKS and "flash" not in model.config._attn_implementation
    return is_blind or bool(readable_layer_types(model))


def has_absolute_positions(model: PreTrainedModel) -> bool:
    """Whether a model reads positions themselves, as a table or a scale, and not only the distances of rotary ones."""
    tables = (name.rpartition(".")[2] for name, _ in model.named_modules())
    settings = model.config.get_text_config().to_dict()
    rope = settings.get("rope_parameters") or {}
    scales = settings.get("attn_temperature_tuning") or rope.get("llama_4_scaling_beta")
    return bool(scales) or any(name == "wpe" or name.startswith(("embed_position", "position_emb")) for name in tables)


def _refuse(model: nn.Module, reasons: list[str]) -> None:
    if reasons:
        config = getattr(model, "config", None)
        family = "" if config is None else f" (model_type={config.model_type})"
        raise UnsupportedModelError(f"{type(model).__name__}{family} cannot train on trees: {'; '.join(reasons)}")


def _reasons(model: PreTrainedModel) -> list[str]:
    config = model.config
    reasons = []
    settings = config.to_dict()
    layer_types = list(settings.get("layer_types") or ())
    recurrent = readable_layer_types(model)
    # Qwen3-Next, Qwen3.5 and Bamba do go through the interface, though they do not say so.
    if not (model._supports_attention_backend or recurrent):
        reasons.append("its attention does not go through transformers' attention interface")
    readable = READABLE_LAYERS | recurrent
    odd_layers = sorted(set(layer_types) - readable)
    if odd_layers:
        reasons.append(f"layer types {odd_layers} carry state along the sequence; readable are {sorted(readable)}")
    reasons += _recurrence_reasons(model) + _head_size_reasons(model)
    text = config.get_text_config().to_dict()
    own_masks = [f"{key}={text[key]} is {what}" for key, what in OWN_MASKS.items() if text.get(key)]
    # Encoders of images and sound do, beside a decoder that does not.
    layers = (module for name, module in model.named_modules() if not any(word in name for word in ENCODERS))
    if any(getattr(module, "is_causal", True) is False for module in layers):
        own_masks.append("it attends in both directions")
    reasons += [f"{mask}; tree attention is causal or sliding" for mask in own_masks[:1]]
    multimodal = [key for key in MULTIMODAL_KEYS if settings.get(key) is not None]
    if multimodal:
        reasons.append(f"multimodal inputs ({multimodal[0]}) are not supported yet")
    reasons += _rope_reasons(settings, has_text_mrope=bool(layers_of(model, GATED_DELTA_NET)))
    return reasons + dropout_reasons(model) + _router_reasons(settings)


def _router_reasons(settings: dict[str, object]) -> list[str]:
    """Settings of Mixture-of-Experts routers that a tree cannot follow."""
    reasons = []
    jitters = {k: v for k, v in settings.items() if "jitter" in k and isinstance(v, int | float) and v > 0}
    if jitters:
        key, value = next(iter(jitters.items()))
        reasons.append(f"{key}={value}: branches would share the routers' noise; set model.override_config.{key}=0")
    if settings.get("output_router_logits"):
        reasons.append(
            "the model's own router auxiliary loss counts unique tokens, not rows (and verl would drop it); set "
            "model.override_config.output_router_logits=False, and tree.router_aux_loss_coef for the loss over rows"
        )
    return reasons


def _recurrence_reasons(model: PreTrainedModel) -> list[str]:
    """Mixers and convolutions over the sequence, but for those that read trees."""
    reasons = []
    inside = [name + "." for name, module in model.named_modules() if kind_of(module) is not None]
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


def _head_size_reasons(model: PreTrainedModel) -> list[str]:
    """Multi-head latent attention has values of another size than keys."""
    for name, module in model.named_modules():
        if hasattr(module, "qk_head_dim") and hasattr(module, "v_head_dim") and module.qk_head_dim != module.v_head_dim:
            sizes = f"keys of {module.qk_head_dim} and values of {module.v_head_dim} dimensions"
            return [f"{name} has {sizes} (multi-head latent attention); tree attention takes one head size"]
    return []


def _rope_reasons(settings: dict[str, object], *, has_text_mrope: bool) -> list[str]:
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return []
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    reasons = []
    for one in per_layer_type or [rope]:
        kind = one.get("rope_type", one.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            reasons.append(f"rope_type={kind} depends on the longest row of a batch")
        # Given one position per token, Qwen3.5 reads it on all three axes: plain rotary positions.
        if "mrope_section" in one and not has_text_mrope:
            reasons.append("multimodal rotary positions (mrope_section) are not supported yet")
    return reasons
