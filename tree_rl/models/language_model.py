"""The language model inside a checkpoint that also reads images, video or sound.

Such a checkpoint (`*ForConditionalGeneration`) loads as a wrapper: a tower for each other kind of input, a language
model and a head.
"""

from typing import Any

from torch import nn

TOWERS = ("vision_config", "audio_config", "speech_config", "perceiver_config")
"""Keys of a config whose model reads more than text."""
TYPE_IDS = ("token_type_ids", "mm_token_type_ids")
"""Which tokens stand for an image: 0 for all tokens of a text."""


def is_wrapper(model: nn.Module) -> bool:
    """Whether a model holds a language model of its own beside other parts."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return False
    return config.get_text_config() is not config or any(getattr(config, key, None) is not None for key in TOWERS)


def language_model(model: nn.Module) -> Any:
    """The decoder stack inside a wrapper, with its embedding and without a head; any other model itself.

    Args:
        model: a Hugging Face model, before FSDP or PEFT wrap it.
    """
    if not is_wrapper(model):
        return model
    stub: Any = model
    embedding = stub.get_input_embeddings()
    # The innermost model that holds the embedding: a wrapper may hold a whole causal language model.
    holders = [m for m in model.modules() if hasattr(m, "config") and hasattr(m, "get_input_embeddings")]
    return [stub.base_model, *(m for m in holders if any(part is embedding for part in m.modules()))][-1]
