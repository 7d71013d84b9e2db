"""Tiny models whose recurrent layers are short convolutions (LFM2) or Mamba 2 (all others)."""

from typing import Any

from tiny_sizes import MAMBA as ONE_GROUP
from tiny_sizes import sizes
from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    PretrainedConfig,
    Zamba2Config,
)

MAMBA = ONE_GROUP | {"mamba_n_groups": 2, "mamba_d_conv": 4}
CONV = {
    "num_hidden_layers": 4,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
}
MULTIPLIERS = {
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}
NEMOTRON_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_latent_size": 20,
    "routed_scaling_factor": 1.5,
}
CHUNK = 96
"""Tokens of the longest row: transformers' Nemotron-H and Zamba 2 are wrong behind a chunk (transformers#47246)."""


def recurrent_configs(**changes: Any) -> dict[str, PretrainedConfig]:
    """One of every family, by name."""
    usual = {"max_position_embeddings": 512, "initializer_range": 0.1, "num_hidden_layers": None, "head_dim": None}
    shared = sizes(**usual | changes)
    return {
        "lfm2": Lfm2Config(**shared, **CONV),
        "lfm2_moe": Lfm2MoeConfig(
            **shared, **CONV, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1
        ),
        "bamba": BambaConfig(**shared, **MAMBA, num_hidden_layers=3, attn_layer_indices=[1], attn_rotary_emb=4),
        "granite_4": GraniteMoeHybridConfig(
            **shared,
            **MAMBA,
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
            position_embedding_type="rope",
        ),
        "nemotron_h": NemotronHConfig(
            **{name: value for name, value in shared.items() if name != "num_hidden_layers"},
            **NEMOTRON_EXPERTS,
            head_dim=8,
            layers_block_type=["mamba", "moe", "attention", "mlp", "mamba", "moe"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=CHUNK,
        ),
        "falcon_h1": FalconH1Config(
            **shared, **MAMBA, **MULTIPLIERS, num_hidden_layers=2, mamba_d_ssm=64, mamba_rms_norm=True
        ),
        "falcon_h1_gate_only": FalconH1Config(**shared, **MAMBA, **MULTIPLIERS, num_hidden_layers=2, mamba_d_ssm=64),
        "zamba2": Zamba2Config(
            **shared | {"num_key_value_heads": 4},
            num_hidden_layers=5,
            layers_block_type=["hybrid", "mamba", "mamba", "hybrid", "hybrid"],
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            adapter_rank=4,
            use_mem_rope=True,
            n_mamba_heads=4,
            mamba_d_state=8,
            mamba_ngroups=2,
            chunk_size=CHUNK,
            time_step_min=0.05,
        ),
    }


RECURRENT = recurrent_configs()
