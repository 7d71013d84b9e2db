"""Chooses transformers' attention implementation for rows that run without a tree."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig


def needs_eager(config: PretrainedConfig) -> bool:
    """True if SDPA lacks something that the model needs, such as a softcap of the scores or attention sinks."""
    text_config = config.get_text_config()
    if text_config.to_dict().get("attn_logit_softcapping") is not None:
        return True
    # Classes with attention sinks declare that they do not support SDPA, and transformers refuses to load them with it.
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    return model_class is not None and not model_class._supports_sdpa
