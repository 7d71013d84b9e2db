"""Finds the language model inside a multimodal model.

Such a model (`*ForConditionalGeneration`) is a wrapper: an encoder ("tower") per other modality, a language model and
a head.
"""

from typing import Any

from torch import nn

TOWERS = ("vision_config", "audio_config", "speech_config", "perceiver_config")
"""Keys that only the configs of multimodal models have."""
TYPE_IDS = ("token_type_ids", "mm_token_type_ids")
"""Inputs that mark image tokens; they are 0 for text."""


def is_wrapper(model: nn.Module) -> bool:
    """True if the model wraps a language model together with other parts."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return False
    return config.get_text_config() is not config or any(getattr(config, key, None) is not None for key in TOWERS)


def language_model(model: nn.Module) -> Any:
    """The decoder stack inside a wrapper, with its embedding, without a head; any other model is returned as it is.

    Args:
        model: a Hugging Face model, before FSDP or PEFT wrap it.
    """
    if not is_wrapper(model):
        return model
    untyped: Any = model
    embedding = untyped.get_input_embeddings()
    # The innermost model that contains the embedding, because a wrapper may contain a whole causal language model.
    holders = [m for m in model.modules() if hasattr(m, "config") and hasattr(m, "get_input_embeddings")]
    return [untyped.base_model, *(m for m in holders if any(part is embedding for part in m.modules()))][-1]
