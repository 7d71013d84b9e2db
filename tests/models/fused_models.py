"""Configurations that Liger has layers for, small enough for Triton in its interpreter."""

from dense_models import FAMILIES, SIZES
from hybrid_models import HYBRIDS
from tiny_sizes import changed
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

ONE_LAYER = {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

DENSE: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**ONE_LAYER),
    "qwen2": changed(FAMILIES["qwen2"], num_hidden_layers=1, layer_types=None),
    "qwen3": Qwen3Config(**ONE_LAYER, tie_word_embeddings=True),
    "mistral": changed(FAMILIES["mistral_window"], num_hidden_layers=1, sliding_window=3),
    "gemma2": changed(FAMILIES["gemma2_softcap"], sliding_window=3),
    "gemma3_text": changed(FAMILIES["gemma3_window"], sliding_window=3, layer_types=["sliding_attention"] * 2),
    "gpt_oss": changed(FAMILIES["gpt_oss_sinks"], num_hidden_layers=1, layer_types=["sliding_attention"]),
    "qwen3_5_text": changed(HYBRIDS["qwen3_5"], **TWO_KINDS),
}
"""Liger replaces norms, rotary embeddings and MLPs."""
SPARSE: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**ONE_LAYER, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**ONE_LAYER, num_local_experts=3),
    "qwen3_next": changed(HYBRIDS["qwen3_next"], **TWO_KINDS, mlp_only_layers=[0]),
    "qwen3_5_moe_text": changed(HYBRIDS["qwen3_5_moe"], num_hidden_layers=1, layer_types=["linear_attention"]),
}
"""It replaces the experts, too."""
ALL = {**DENSE, **SPARSE}
