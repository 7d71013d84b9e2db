"""Tiny models whose recurrent layers are short convolutions (LFM2) or Mamba 2 (all others)."""

from typing import Any

from tiny_sizes import MAMBA as ONE_GROUP
from tiny_sizes import config_of, sizes
from transformers import PretrainedConfig

MAMBA = ONE_GROUP | {"mamba_n_groups": 2, "mamba_d_conv": 4}
CONV = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}
MULTIPLIERS = {"embedding_multiplier": 1.5, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.7, 1.3]}
MULTIPLIERS |= {"key_multiplier": 0.8, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9}
MULTIPLIERS |= {"ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]}
CHUNK = 96
"""Tokens of the longest row: transformers' Nemotron-H and Zamba 2 are wrong behind a chunk (transformers#47246)."""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
NEMOTRON_EXPERTS = {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": 20}
NEMOTRON_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
GRANITE = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
GRANITE |= {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "rope"}
ZAMBA = {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 4, "use_mem_rope": True}
ZAMBA |= {"num_key_value_heads": 4}
ZAMBA_MAMBA = {"n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 2, "time_step_min": 0.05, "chunk_size": CHUNK}


def recurrent_configs(**changes: Any) -> dict[str, PretrainedConfig]:
    """One of every family, by name."""
    usual = {"max_position_embeddings": 512, "initializer_range": 0.1, "num_hidden_layers": None, "head_dim": None}
    shared = sizes(**usual | changes)
    hybrid = {"layers_block_type": ["hybrid", "mamba", "mamba", "hybrid", "hybrid"]}
    mixed = {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"]}
    falcon = {**shared, **MAMBA, **MULTIPLIERS, "num_hidden_layers": 2, "mamba_d_ssm": 64}
    nemotron = {**shared, **EXPERTS, **NEMOTRON_EXPERTS, **NEMOTRON_MAMBA, **mixed, "head_dim": 8, "chunk_size": CHUNK}
    return {
        "lfm2": config_of("lfm2", **shared, **CONV, num_hidden_layers=4),
        "lfm2_moe": config_of(
            "lfm2_moe", **shared, **CONV, **EXPERTS, num_hidden_layers=4, num_experts=4, num_dense_layers=1
        ),
        "bamba": config_of("bamba", **shared, **MAMBA, num_hidden_layers=3, attn_layer_indices=[1], attn_rotary_emb=4),
        "granite_4": config_of("granitemoehybrid", **shared, **MAMBA, **GRANITE, num_hidden_layers=3),
        "nemotron_h": config_of("nemotron_h", **nemotron, routed_scaling_factor=1.5),
        "falcon_h1": config_of("falcon_h1", **falcon, mamba_rms_norm=True),
        "falcon_h1_gate_only": config_of("falcon_h1", **falcon),
        "zamba2": config_of("zamba2", **{**shared, **ZAMBA, **ZAMBA_MAMBA, **hybrid, "num_hidden_layers": 5}),
    }


RECURRENT = recurrent_configs()
