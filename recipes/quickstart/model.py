"""The quickstart's policy: Qwen3's architecture, small enough to train from scratch on two CPU cores."""

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, hidden_size: int = 128, num_layers: int = 2
) -> Qwen3ForCausalLM:
    """Create a randomly initialised Qwen3 model that fits `tokenizer`.

    Args:
        tokenizer: Gives the vocabulary size and the end-of-sequence and padding ids.
        seed: Seed of the initialisation.
        hidden_size: Width, a multiple of 32 (the head size).
        num_layers: Decoder layers.

    Returns:
        The model in float32, embeddings tied, two query heads for each key-value head.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.05,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        _start_as_copy(layer.self_attn, groups=config.num_attention_heads // config.num_key_value_heads)
    return model


@torch.no_grad()
def _start_as_copy(attention: torch.nn.Module, *, groups: int) -> None:
    """Begin with the output projection as the transpose of the value projection.

    With tied embeddings, attending to a token then means predicting it: what is left to learn is where to look.
    """
    torch.nn.init.orthogonal_(attention.v_proj.weight)
    values = attention.v_proj.weight.view(-1, attention.head_dim, attention.v_proj.in_features)
    attention.o_proj.weight.copy_(values.repeat_interleave(groups, dim=0).flatten(0, 1).T / groups)
