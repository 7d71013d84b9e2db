"""Dropout is refused however it is spelled, with the key that sets it to 0; a model without any passes."""

from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
    Starcoder2Config,
)

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention
from tree_rl.training import TreeStep

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4}
SPELLINGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any], dict[str, float]]] = {
    "phi_2": (PhiConfig, SIZES, {"resid_pdrop": 0.1, "embd_pdrop": 0.0}),
    "phi_embeddings": (PhiConfig, SIZES, {"resid_pdrop": 0.0, "embd_pdrop": 0.2}),
    "gpt2": (GPT2Config, GPT2, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "gpt2_attention": (GPT2Config, GPT2, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.3}),
    "starcoder2": (Starcoder2Config, SIZES, {"residual_dropout": 0.1, "embedding_dropout": 0.05}),
    "opt_layers": (OPTConfig, {**SIZES, "ffn_dim": 40, "word_embed_proj_dim": 32}, {"dropout": 0.0, "layerdrop": 0.2}),
}


def causal(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def adapted(adapter: Any) -> Any:
    model = causal(LlamaConfig(**SIZES))
    use_tree_attention(model)
    return get_peft_model(model, adapter)


@pytest.mark.parametrize("family", SPELLINGS)
def test_every_key_of_a_config_is_named(family: str) -> None:
    config, sizes, dropouts = SPELLINGS[family]
    with pytest.raises(UnsupportedModelError) as refused:
        check_model(causal(config(**sizes, **dropouts)))
    for key, value in dropouts.items():
        assert (f"{key}={value}: branches would share one dropout mask; " in str(refused.value)) == (value > 0)
        assert (f"set model.override_config.{key}=0" in str(refused.value)) == (value > 0)
    check_model(causal(config(**sizes, **dict.fromkeys(dropouts, 0.0))))


@pytest.mark.parametrize(
    "adapter, key",
    (
        (LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05), "lora_dropout=0.05"),
        (LoHaConfig(r=2, target_modules=["q_proj"], rank_dropout=0.2), "rank_dropout=0.2"),
    ),
    ids=("lora", "loha"),
)
def test_dropout_of_an_adapter(adapter: Any, key: str) -> None:
    remedy = rf'set "{key.partition("=")[0]}": 0\.0 in adapter_config\.json of model\.lora_adapter_path'
    with pytest.raises(UnsupportedModelError, match=rf"{key} of the adapter: .*{remedy}"):
        TreeStep(adapted(adapter))


def test_an_adapter_without_dropout_passes() -> None:
    TreeStep(adapted(LoraConfig(r=2, target_modules=["q_proj"])))


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
    model = causal(LlamaConfig(**SIZES))
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, module)
    with pytest.raises(UnsupportedModelError, match=rf"{named} drops out with probability 0\.25"):
        check_model(model)


def test_the_head_of_a_classifier_counts_where_it_is_built() -> None:
    config = Qwen3Config(**SIZES, head_dim=8, classifier_dropout=0.15, num_labels=1)
    check_model(causal(config))
    with pytest.raises(
        UnsupportedModelError, match=r"classifier_dropout=0\.15: .*override_config\.classifier_dropout=0"
    ):
        check_model(AutoModelForTokenClassification.from_config(config))
