"""Tiny models with multi-head latent attention, whose keys and values have different sizes."""

from typing import Any

from tiny_sizes import sizes
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, PretrainedConfig, YoutuConfig

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
"""Rotary angles as DeepSeek publishes them, which also scale the scores."""
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def latent_configs(**changes: Any) -> dict[str, PretrainedConfig]:
    """One of every family, by name; DeepSeek-V2 without a query rank, as V2-Lite, GLM with values wider than keys."""
    shared = sizes(num_key_value_heads=4, head_dim=None, attention_dropout=0.0, **changes)
    experts = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2}
    sparse = shared | LATENT | experts | {"n_group": 3, "topk_group": 2}
    return {
        "deepseek_v2": DeepseekV2Config(
            **(sparse | {"q_lora_rank": None}), first_k_dense_replace=1, rope_parameters=YARN
        ),
        "deepseek_v3": DeepseekV3Config(**sparse, first_k_dense_replace=1, rope_parameters=YARN),
        "glm4_moe_lite": Glm4MoeLiteConfig(**(sparse | {"v_head_dim": 20, "n_group": 1, "topk_group": 1})),
        "youtu": YoutuConfig(**shared, **LATENT),
    }
