"""Models whose activations outweigh what is fixed, and rows of three shapes for them."""

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from tree_rl.models import use_edge_head, use_tree_attention

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
SIZES |= {"attention_dropout": 0.0, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}


def build(kind: str, *, checkpointing: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config: Any = Qwen3Config(**SIZES) if kind == "dense" else Qwen3MoeConfig(**SIZES, **EXPERTS)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_tree_attention(model)
    use_edge_head(model)
    return model.train()


def rows_of(shape: str) -> list[np.ndarray]:
    """A long trunk with two branches, a comb with a tooth at every fifth of its spine, a bush of ten branches."""
    draw = np.random.default_rng(0)
    trunk_tokens, branches, tokens = {"trunk": (500, 2, 75), "comb": (500, 5, 60), "bush": (100, 8, 75)}[shape]
    trunk = draw.integers(1, 400, trunk_tokens)
    starts = [trunk_tokens * (i + 1) // branches if shape == "comb" else trunk_tokens for i in range(branches)]
    return [np.concatenate([trunk[:s], [400 + i], draw.integers(1, 400, tokens - 1)]) for i, s in enumerate(starts)]


F32, BF16 = torch.float32, torch.bfloat16
