"""Tiny models whose recurrent layers are short convolutions (LFM2) or Mamba 2 (Bamba, Granite 4)."""

from typing import Any

from tiny_sizes import MAMBA as ONE_GROUP
from tiny_sizes import sizes
from transformers import BambaConfig, GraniteMoeHybridConfig, Lfm2Config, Lfm2MoeConfig, PretrainedConfig

SIZES: dict[str, Any] = sizes(max_position_embeddings=512, initializer_range=0.1, num_hidden_layers=None, head_dim=None)
MAMBA = ONE_GROUP | {"mamba_n_groups": 2, "mamba_d_conv": 4}
CONV = {
    "num_hidden_layers": 4,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
}
RECURRENT: dict[str, PretrainedConfig] = {
    "lfm2": Lfm2Config(**SIZES, **CONV),
    "lfm2_moe": Lfm2MoeConfig(
        **SIZES, **CONV, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1
    ),
    "bamba": BambaConfig(**SIZES, **MAMBA, num_hidden_layers=3, attn_layer_indices=[1], attn_rotary_emb=4),
    "granite_4": GraniteMoeHybridConfig(
        **SIZES,
        **MAMBA,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        position_embedding_type="rope",
    ),
}
