"""Sizes of tiny models, as configurations of transformers name them, and rows that branch."""

from typing import Any

import numpy as np
from transformers import AutoConfig

VOCAB = 61
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DELTA_NET = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
DELTA_NET |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
"""Of Gated DeltaNets."""
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 16}
HYBRID = ["linear_attention", "full_attention"]
"""Kinds of two layers."""


def sizes(**changes: Any) -> dict[str, Any]:
    """Of two layers of attention; what changes to None is left out."""
    usual = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    return {name: value for name, value in (usual | changes).items() if value is not None}


config_of = AutoConfig.for_model
"""A configuration of transformers: its model type, then its settings by name."""


def changed(config: Any, **changes: Any) -> Any:
    """A copy of a configuration of transformers, with other settings."""
    return type(config)(**{**config.to_dict(), **changes})


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


TRUNK = tokens(1, 9)
BRANCHING: dict[str, list[list[int]]] = {
    "branches": [TRUNK + tokens(10 + i, 4 + i) for i in range(3)],
    "identical_and_strict_prefix": [TRUNK, TRUNK[:5], TRUNK, TRUNK[:8]],
    "single_tokens": [[5], [5], [7], TRUNK[:1], TRUNK[:2]],
    "no_common_root": [tokens(20 + i, 3 + i) for i in range(3)],
    "comb": [TRUNK[: 2 + 2 * i] + tokens(30 + i, 3) for i in range(4)],
}
