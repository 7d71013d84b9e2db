"""A layer that restricts attention by more than the causal or sliding mask is refused: at start, else when called."""

from typing import Any

import pytest
import torch
from tiny_sizes import sizes
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DogeConfig,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.tree.forest import Forest

SIZES = sizes(num_key_value_heads=None, head_dim=None)
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
INDEXER = {"index_topk": 2048, "index_n_heads": 2, "index_head_dim": 16, "num_key_value_heads": 4}
KEEPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOLD: dict[str, tuple[PretrainedConfig, str]] = {
    "glm_5": (GlmMoeDsaConfig(**SIZES, **LATENT, **EXPERTS, **INDEXER), "index_topk=2048 is a sparse indexer"),
    "doge": (DogeConfig(**SIZES, num_key_value_heads=2), "keep_window_size=2048 is a dynamic mask"),
    "bert": (BertConfig(**SIZES, **KEEPS), "it attends in both directions"),
    "gemma_3_encoder": (
        Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, use_bidirectional_attention=True),
        "it attends in both directions",
    ),
    "qwen_2_encoder": (
        Qwen2Config(**SIZES, is_causal=False),
        "mask of its Qwen2DecoderLayer is neither causal nor sliding",
    ),
}


def build(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("family", TOLD)
def test_a_config_that_tells_it_is_refused_before_anything_runs(family: str) -> None:
    config, reason = TOLD[family]
    with pytest.raises(UnsupportedModelError, match=reason):
        use_tree_attention(build(config))


def bias(tokens: int) -> torch.Tensor:
    return torch.zeros(1, 1, tokens, tokens)


@pytest.mark.parametrize(
    "asked, reason",
    (
        (lambda tokens: {"attention_mask": bias(tokens)}, "a mask of its own"),
        (lambda tokens: {"attention_mask": bias(tokens).bool()}, "a mask of its own"),
        (lambda tokens: {"indices": torch.zeros(1, tokens, 2, dtype=torch.long)}, "indices, which tree attention"),
        (lambda tokens: {"position_bias": bias(tokens)}, "position_bias, which tree attention"),
        (lambda tokens: {"is_causal": False}, "attention in both directions"),
    ),
    ids=("bias", "truth_values", "indices", "position_bias", "both_directions"),
)
def test_what_only_the_layer_knows_is_refused_at_its_first_call(asked: Any, reason: str) -> None:
    model = build(LlamaConfig(**SIZES))
    check_model(model)
    use_tree_attention(model)

    def restrict(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, **asked(kwargs["hidden_states"].shape[1])}

    model.model.layers[1].self_attn.register_forward_pre_hook(restrict, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=f"LlamaAttention .*: its attention asks for {reason}"):
        forest_log_probs(model, Forest.from_rows([[3, 4, 5], [3, 4, 6, 7]]))
