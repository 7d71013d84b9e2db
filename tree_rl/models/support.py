"""Which models a tree can run exactly. Whatever cannot be exact is refused by name before training starts."""

from torch import nn
from transformers import PreTrainedModel

READABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
MULTIMODAL_KEYS = ("vision_config", "audio_config", "speech_config")


class UnsupportedModelError(ValueError):
    """A model whose tree run would differ from its rows run alone."""


def check_model(model: PreTrainedModel) -> None:
    """Refuse models that a tree cannot run exactly.

    Args:
        model: a Hugging Face causal language model or token classifier, before any wrapping.

    Raises:
        UnsupportedModelError: names the model type, the offending setting and the remedy.
    """
    config = model.config
    name = f"{type(model).__name__} (model_type={config.model_type})"
    reasons = _reasons(model)
    if reasons:
        raise UnsupportedModelError(f"{name} cannot train on trees: {'; '.join(reasons)}")


def _reasons(model: PreTrainedModel) -> list[str]:
    config = model.config
    reasons = []
    if not model._supports_attention_backend:
        reasons.append("its attention does not go through transformers' attention interface")
    settings = config.to_dict()
    odd_layers = sorted(set(settings.get("layer_types") or ()) - READABLE_LAYERS)
    if odd_layers:
        reasons.append(
            f"layer types {odd_layers} carry state along the sequence; readable are {sorted(READABLE_LAYERS)}"
        )
    convolutions = [n for n, m in model.named_modules() if isinstance(m, nn.Conv1d)]
    if convolutions:
        reasons.append(f"convolution over the sequence in {convolutions[0]}")
    multimodal = [key for key in MULTIMODAL_KEYS if settings.get(key) is not None]
    if multimodal:
        reasons.append(f"multimodal inputs ({multimodal[0]}) are not supported yet")
    reasons += _rope_reasons(settings)
    dropouts = {k: v for k, v in settings.items() if "dropout" in k and isinstance(v, int | float) and v > 0}
    # A classifier head drops out behind the last layer, once per unique token, as the flat run does.
    dropouts.pop("classifier_dropout", None)
    if dropouts:
        key, value = next(iter(dropouts.items()))
        reasons.append(f"{key}={value}: branches would share one dropout mask; set model.override_config.{key}=0")
    if settings.get("output_router_logits"):
        reasons.append(
            "the router auxiliary loss counts unique tokens, not rows; "
            "set model.override_config.output_router_logits=False"
        )
    return reasons


def _rope_reasons(settings: dict[str, object]) -> list[str]:
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return []
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    reasons = []
    for one in per_layer_type or [rope]:
        kind = one.get("rope_type", one.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            reasons.append(f"rope_type={kind} depends on the longest row of a batch")
        if "mrope_section" in one:
            reasons.append("multimodal rotary positions (mrope_section) are not supported yet")
    return reasons
