"""The quickstart's policy: Qwen3's architecture, small enough to train from scratch on two CPU cores."""

import tiny_model
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Build the untrained policy: two layers of width 128, embeddings tied."""
    model = tiny_model.build_model(tokenizer, seed=seed, width=128, rope_theta=10000.0, initializer_range=0.05)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    for layer in model.model.layers:
        _start_as_copy(layer.self_attn, groups=groups)
    return model


@torch.no_grad()
def _start_as_copy(attention: torch.nn.Module, *, groups: int) -> None:
    """Begin with the output projection as the transpose of the value projection.

    With tied embeddings, attending to a token then means predicting it: what is left to learn is where to look.
    """
    torch.nn.init.orthogonal_(attention.v_proj.weight)
    values = attention.v_proj.weight.view(-1, attention.head_dim, attention.v_proj.in_features)
    attention.o_proj.weight.copy_(values.repeat_interleave(groups, dim=0).flatten(0, 1).T / groups)
