"""Every supported model family, in float64: log-probs and gradients of a forest are those of its rows run alone."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.training.whole import forest_log_probs
from tree_rl.tree.forest import Forest

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
GPT_OSS_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mistral_window": MistralConfig(**SIZES, sliding_window=5),
    "gemma2_softcap": Gemma2Config(
        **SIZES, sliding_window=5, attn_logit_softcapping=4.0, final_logit_softcapping=6.0, query_pre_attn_scalar=8
    ),
    "gemma3_window": Gemma3TextConfig(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "gpt_oss_sinks": GptOssConfig(
        **SIZES, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, rope_parameters=GPT_OSS_ROPE
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}


def build(config: PretrainedConfig, attention: str = "eager") -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def some_rows() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    trunk = draw.integers(1, VOCAB, 9)
    rows = [
        np.concatenate([trunk[:cut], draw.integers(1, VOCAB, more)]) for cut, more in ((9, 3), (9, 8), (4, 6), (9, 0))
    ]
    return [*rows, draw.integers(1, VOCAB, 5), rows[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_forest_equals_rows_alone(family: str) -> None:
    model = build(FAMILIES[family])
    rows = some_rows()
    expected = branch_log_probs(model, rows)
    weight = torch.from_numpy(np.random.default_rng(1).normal(size=len(expected)))
    parameters = dict(model.named_parameters())
    expected_gradients = torch.autograd.grad((expected * weight).sum(), parameters.values(), allow_unused=True)

    check_model(model)
    use_tree_attention(model)
    got = forest_log_probs(model, Forest.from_rows(rows))
    # Several families normalise and route in float32 whatever the model's dtype, hence not 1e-10 here.
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((got * weight).sum(), parameters.values(), allow_unused=True)
    for name, gradient, reference in zip(parameters, gradients, expected_gradients, strict=True):
        if reference is not None and reference.norm() > 1e-9:
            assert float((gradient - reference).norm() / reference.norm()) < 1e-5, name


def test_llama_in_float64_is_exact_to_rounding() -> None:
    # Llama with float64 norms and rotary angles: nothing in the model rounds to float32.
    model = build(FAMILIES["llama"], "sdpa")
    _float64_throughout(model)
    rows = some_rows()
    expected = branch_log_probs(model, rows)
    use_tree_attention(model)
    got = forest_log_probs(model, Forest.from_rows(rows))
    assert got.dtype == torch.float64
    assert float((got - expected).detach().abs().max()) < 1e-10


def test_flat_calls_keep_their_attention() -> None:
    model = build(FAMILIES["mistral_window"])
    ids = torch.tensor([some_rows()[1].tolist()])
    before = model(input_ids=ids).logits
    assert use_tree_attention(model) == "eager"
    assert use_tree_attention(model) == "eager"
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)


def test_dropout_is_refused_by_name() -> None:
    model = build(LlamaConfig(**{**SIZES, "attention_dropout": 0.1}))
    with pytest.raises(UnsupportedModelError, match=r"attention_dropout=0\.1"):
        check_model(model)


def test_length_dependent_rope_is_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="rope_type=dynamic"):
        check_model(build(LlamaConfig(**SIZES, rope_parameters=rope)))


def test_router_auxiliary_loss_is_refused_by_name() -> None:
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    with pytest.raises(UnsupportedModelError, match=r"output_router_logits=False, and tree\.router_aux_loss_coef"):
        check_model(build(Qwen3MoeConfig(**sizes, output_router_logits=True)))


def test_latent_attention_is_refused_by_name() -> None:
    sizes = {**{key: value for key, value in SIZES.items() if key != "head_dim"}, "num_key_value_heads": 4}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    with pytest.raises(UnsupportedModelError, match="keys of 16 and values of 8 dimensions"):
        check_model(build(DeepseekV3Config(**sizes, **latent, **experts, moe_intermediate_size=16)))


def test_router_noise_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"router_jitter_noise=0\.1: branches would share"):
        check_model(build(MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1)))


def _float64_throughout(model: torch.nn.Module) -> None:
    from transformers.models.llama import modeling_llama

    def norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self: torch.nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()

    for module in model.modules():
        if isinstance(module, modeling_llama.LlamaRMSNorm):
            module.forward = norm.__get__(module)
        if isinstance(module, modeling_llama.LlamaRotaryEmbedding):
            module.forward = rotary.__get__(module)
