"""Which of transformers' attentions computes a model where rows run without a tree."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig


def needs_eager(config: PretrainedConfig) -> bool:
    """Whether SDPA would leave something out: a soft-cap of the scores, attention sinks, whatever the class says.

    Args:
        config: of any head.
    """
    text_config = config.get_text_config()
    if text_config.to_dict().get("attn_logit_softcapping") is not None:
        return True
    # The class itself says no for sinks, and transformers then refuses to load it.
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    return model_class is not None and not model_class._supports_sdpa
