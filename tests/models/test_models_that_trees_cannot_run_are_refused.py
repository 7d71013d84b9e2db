"""A model that a tree cannot run exactly is refused by name: what depends on a row's length, on places or on chance,
recurrences that do not branch, and a layer that restricts attention by more than the causal or sliding mask, at start
or else when called.

So is dropout, however it is spelled, with the key that sets it to 0; a model without any passes.
"""

from typing import Any

import pytest
import torch
from dense_models import dbrx
from hybrid_models import HYBRIDS
from peft import LoHaConfig, LoraConfig, get_peft_model
from recurrent_models import RECURRENT
from tiny_sizes import changed, config_of, sizes
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PretrainedConfig

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention
from tree_rl.training import TreeStep
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.tree.forest import Forest

SIZES = sizes(num_key_value_heads=None, head_dim=None)
GROUPED = sizes()
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
BY_PLACE = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": True}
BY_PLACE |= {**GROUPED, "num_local_experts": 2, "intermediate_size_mlp": 40}
AUXILIARY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
LIGHTNING = {"num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}
BRANCHING_STATE = r"layers\.0\.\S+ is a %s.* that are: BambaMixer, .*Lfm2"
GELU = r"layers\.0\.\S+ applies gelu to its convolution"
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
INDEXER = {"index_topk": 2048, "index_n_heads": 2, "index_head_dim": 16, "num_key_value_heads": 4}
KEEPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOLD: dict[str, tuple[PretrainedConfig, str]] = {
    "llama": (config_of("llama", **GROUPED, rope_parameters=DYNAMIC), "rope_type=dynamic"),
    "llama4": (config_of("llama4_text", **BY_PLACE), r"model_type=llama4_text.*attn_temperature_tuning=True scales"),
    "qwen3_moe": (
        config_of("qwen3_moe", **GROUPED, **AUXILIARY),
        r"output_router_logits=False, and tree\.router_aux_loss_coef",
    ),
    "mixtral": (
        config_of("mixtral", **GROUPED, num_local_experts=4, router_jitter_noise=0.1),
        r"router_jitter_noise=0\.1: branches would share .*set model\.override_config\.router_jitter_noise=0",
    ),
    "dbrx": (
        dbrx(moe_jitter_eps=0.2),
        r"ffn_config\.moe_jitter_eps=0\.2: .*set model\.override_config\.ffn_config\.moe_jitter_eps=0",
    ),
    "phimoe": (
        config_of("phimoe", **GROUPED, num_local_experts=4, router_jitter_noise=0.01),
        r"router_jitter_noise=0\.01: its routers choose at random .* weight 1; train on rows",
    ),
    "mamba2": (config_of("mamba2", **SIZES, **MAMBA2), BRANCHING_STATE % "Mamba2Mixer"),
    "minimax": (config_of("minimax", **GROUPED, **LIGHTNING), BRANCHING_STATE % "MiniMaxLightningAttention"),
    "qwen3_next_gelu": (changed(HYBRIDS["qwen3_next"], hidden_act="gelu"), GELU),
    "bamba_gelu": (changed(RECURRENT["bamba"], hidden_act="gelu"), GELU),
    "glm_5": (config_of("glm_moe_dsa", **SIZES, **LATENT, **EXPERTS, **INDEXER), "index_topk=2048 is a sparse indexer"),
    "doge": (config_of("doge", **SIZES, num_key_value_heads=2), "keep_window_size=2048 is a dynamic mask"),
    "bert": (config_of("bert", **SIZES, **KEEPS), "it attends in both directions"),
    "gemma_3_encoder": (
        config_of("gemma3_text", **GROUPED, use_bidirectional_attention=True),
        "it attends in both directions",
    ),
    "qwen_2_encoder": (config_of("qwen2", **SIZES, is_causal=False), "Qwen2DecoderLayer is neither causal nor sliding"),
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
    model = build(config_of("llama", **SIZES))
    check_model(model)
    use_tree_attention(model)

    def restrict(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, **asked(kwargs["hidden_states"].shape[1])}

    model.model.layers[1].self_attn.register_forward_pre_hook(restrict, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=f"LlamaAttention .*: its attention asks for {reason}"):
        forest_log_probs(model, Forest.from_rows([[3, 4, 5], [3, 4, 6, 7]]))


GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4}
SPELLINGS: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "phi_2": ("phi", SIZES, {"resid_pdrop": 0.1, "embd_pdrop": 0.0}),
    "phi_embeddings": ("phi", SIZES, {"resid_pdrop": 0.0, "embd_pdrop": 0.2}),
    "gpt2": ("gpt2", GPT2, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "gpt2_attention": ("gpt2", GPT2, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.3}),
    "starcoder2": ("starcoder2", SIZES, {"residual_dropout": 0.1, "embedding_dropout": 0.05}),
    "opt_layers": ("opt", {**SIZES, "ffn_dim": 40, "word_embed_proj_dim": 32}, {"dropout": 0.0, "layerdrop": 0.2}),
}


def adapted(adapter: Any) -> Any:
    model = build(config_of("llama", **SIZES))
    use_tree_attention(model)
    return get_peft_model(model, adapter)


@pytest.mark.parametrize("family", SPELLINGS)
def test_every_key_of_a_config_is_named(family: str) -> None:
    model_type, sizes, dropouts = SPELLINGS[family]
    with pytest.raises(UnsupportedModelError) as refused:
        check_model(build(config_of(model_type, **sizes, **dropouts)))
    for key, value in dropouts.items():
        assert (f"{key}={value}: branches would share one dropout mask; " in str(refused.value)) == (value > 0)
        assert (f"set model.override_config.{key}=0" in str(refused.value)) == (value > 0)
    check_model(build(config_of(model_type, **sizes, **dict.fromkeys(dropouts, 0.0))))


@pytest.mark.parametrize(
    "adapter, key",
    (
        (LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05), "lora_dropout=0.05"),
        (LoHaConfig(r=2, target_modules=["q_proj"], rank_dropout=0.2), "rank_dropout=0.2"),
    ),
    ids=("lora", "loha"),
)
def test_dropout_of_an_adapter_is_refused_and_an_adapter_without_it_passes(adapter: Any, key: str) -> None:
    remedy = rf'set "{key.partition("=")[0]}": 0\.0 in adapter_config\.json of model\.lora_adapter_path'
    with pytest.raises(UnsupportedModelError, match=rf"{key} of the adapter: .*{remedy}"):
        TreeStep(adapted(adapter))
    TreeStep(adapted(type(adapter)(r=2, target_modules=["q_proj"])))


class Dropping(nn.Module):
    """Keeps a probability for a function, and no key in the config says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn_drop = 0.25

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, self.ffn_drop, self.training)


@pytest.mark.parametrize(
    "module, named",
    ((nn.Dropout(0.25), r"layers\.0\.mlp\.1\.p"), (Dropping(), r"layers\.0\.mlp\.1\.ffn_drop")),
    ids=("module", "attribute"),
)
def test_dropout_that_no_key_tells_is_named_by_its_module(module: nn.Module, named: str) -> None:
    model = build(config_of("llama", **SIZES))
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, module)
    with pytest.raises(UnsupportedModelError, match=rf"{named} drops out with probability 0\.25"):
        check_model(model)


def test_router_noise_that_no_key_tells_is_named_by_its_module() -> None:
    model = build(config_of("mixtral", **GROUPED, num_local_experts=4))
    model.model.layers[1].mlp.gate.jitter = 0.3
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.gate\.jitter=0\.3: branches would share"):
        check_model(model)


def test_the_head_of_a_classifier_counts_where_it_is_built() -> None:
    config = config_of("qwen3", **SIZES, head_dim=8, classifier_dropout=0.15, num_labels=1)
    check_model(build(config))
    with pytest.raises(
        UnsupportedModelError, match=r"classifier_dropout=0\.15: .*override_config\.classifier_dropout=0"
    ):
        check_model(AutoModelForTokenClassification.from_config(config))
