"""Every supported model family, in float64: log-probs and gradients of a forest are those of its rows run alone."""

from typing import Any

import pytest
from dense_models import FAMILIES, SIZES, assert_reads_trees, build
from tiny_sizes import VOCAB
from transformers import (
    DbrxConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig

from tree_rl.models import UnsupportedModelError, check_model


def dbrx(**experts: Any) -> PretrainedConfig:
    """A config whose settings are nested."""
    attention = DbrxAttentionConfig(kv_n_heads=2, clip_qkv=0.5, rope_theta=1e4, attn_pdrop=0.0)
    layers = DbrxFFNConfig(hidden_size=32, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, **experts)
    return DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        vocab_size=VOCAB,
        max_seq_len=256,
        attn_config=attention,
        ffn_config=layers,
        resid_pdrop=0.0,
        emb_pdrop=0.0,
    )


MORE = {"dbrx": dbrx()}


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_forest_equals_rows_alone(family: str) -> None:
    assert_reads_trees(build({**FAMILIES, **MORE}[family]))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
BY_PLACE = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": True}
AUXILIARY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}
REFUSED: dict[str, tuple[PretrainedConfig, str]] = {
    "llama": (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), "rope_type=dynamic"),
    "llama4": (
        Llama4TextConfig(**SIZES, **BY_PLACE, num_local_experts=2, intermediate_size_mlp=40),
        r"model_type=llama4_text.*attn_temperature_tuning=True scales",
    ),
    "qwen3_moe": (Qwen3MoeConfig(**SIZES, **AUXILIARY), r"output_router_logits=False, and tree\.router_aux_loss_coef"),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1),
        r"router_jitter_noise=0\.1: branches would share .*set model\.override_config\.router_jitter_noise=0",
    ),
    "dbrx": (
        dbrx(moe_jitter_eps=0.2),
        r"ffn_config\.moe_jitter_eps=0\.2: .*set model\.override_config\.ffn_config\.moe_jitter_eps=0",
    ),
    "phimoe": (
        PhimoeConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.01),
        r"router_jitter_noise=0\.01: its routers choose at random .* weight 1; train on rows",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_depends_on_length_place_or_chance_is_refused_by_name(family: str) -> None:
    config, reason = REFUSED[family]
    with pytest.raises(UnsupportedModelError, match=reason):
        check_model(build(config))


def test_router_noise_that_no_key_tells_is_named_by_its_module() -> None:
    model = build(MixtralConfig(**SIZES, num_local_experts=4))
    model.model.layers[1].mlp.gate.jitter = 0.3
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.gate\.jitter=0\.3: branches would share"):
        check_model(model)
