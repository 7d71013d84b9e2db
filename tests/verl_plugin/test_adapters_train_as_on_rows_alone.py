"""Adapters that stock verl trains, the embedding's and the head's too, train on trees as on rows alone.

What verl's FSDP engine cannot shard ends here in the name of model, adapter and remedy.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import build_engine, save_model, tiny_qwen3
from equivalence import alone, assert_trains_as
from hostile_rows import SHAPES
from peft import LoraConfig, get_peft_model
from tiny_sizes import sizes
from transformers import AutoConfig, AutoModelForCausalLM

from tree_rl.verl_plugin.options import TreeConfig
from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError

ROWS = SHAPES["comb"]
Q, TOKENS = ["q_proj"], {"trainable_token_indices": sorted(set(ROWS[0].tokens[:3]))}
TRAINED: dict[str, tuple[bool, dict[str, Any], str]] = {
    # name: (tied, options of the adapter, part of a trained parameter's name)
    "embedding": (True, {"target_modules": [*Q, "embed_tokens"]}, "lora_embedding_A"),
    "embedding and head": (True, {"target_modules": ["embed_tokens", "lm_head"]}, "lm_head.lora_A"),
    "tokens of embed_tokens": (
        *(False, {"target_modules": Q, "trainable_token_indices": {"embed_tokens": [0, ROWS[0].tokens[1]]}}),
        "trainable_tokens_delta",
    ),
    "whole head": (False, {"target_modules": Q, "modules_to_save": ["lm_head"]}, "lm_head.modules_to_save"),
    "whole embedding": (True, {"target_modules": Q, "modules_to_save": ["embed_tokens"]}, "embed_tokens.modules_to_"),
    "whole norms": (False, {"target_modules": Q, "modules_to_save": ["norm"]}, "norm.modules_to_save"),
    "dora": (False, {"target_modules": [*Q, "up_proj"], "use_dora": True}, "lora_magnitude_vector"),
    "dora of the embedding": (True, {"target_modules": ["embed_tokens"], "use_dora": True}, "lora_magnitude_vector"),
    "biases": (False, {"target_modules": Q, "bias": "all"}, "q_proj.base_layer.bias"),
    "bias of the factors": (True, {"target_modules": ["lm_head"], "lora_bias": True}, "lora_B.default.bias"),
}
REFUSED: dict[str, tuple[bool, dict[str, Any], str]] = {
    "embedding": (False, {"target_modules": [*Q, "embed_tokens"]}, "LoRA on the embedding in qwen3"),
    "head": (False, {"target_modules": [*Q, "lm_head"]}, "LoRA on the head in qwen3"),
    "whole embedding": (False, {"target_modules": Q, "modules_to_save": ["embed_tokens"]}, "modules_to_save with the"),
    "tokens": (True, {"target_modules": Q, **TOKENS}, "trainable_token_indices in qwen3"),
    "tied factors": (True, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, "ensure_weight_tying"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return {
        tied: save_model(tmp_path_factory.mktemp("model"), tiny_qwen3(tie_word_embeddings=tied, attention_bias=True))
        for tied in (True, False)
    }


def with_adapter(model: Path, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """verl's options of a model with an adapter that has trained before, and of recomputed layers."""
    torch.manual_seed(7)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)
    for name, weight in adapted.named_parameters():
        if weight.requires_grad and "magnitude" not in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder)
    loaded = {"lora_rank": 4, "lora_alpha": 8, "lora_adapter_path": str(folder)}
    return {**loaded, "enable_gradient_checkpointing": True}


SLOW = ("embedding and head", "whole embedding", "dora", "biases")


@pytest.mark.parametrize(
    "adapter", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in TRAINED]
)
def test_what_stock_verl_trains(models: dict[bool, Path], tmp_path: Path, adapter: str) -> None:
    tied, options, trained = TRAINED[adapter]
    model = with_adapter(models[tied], tmp_path, options)
    stock = alone(build_engine(models[tied], tree=None, model=model), ROWS)
    tree = build_engine(models[tied], tree=TreeConfig(mode="tree", max_tokens=20), model=model)
    got = assert_trains_as(stock, tree, ROWS)
    assert any(trained in name and float(gradient.norm()) > 0 for name, gradient in got["gradients"].items())


@pytest.mark.parametrize("adapter", REFUSED)
def test_what_verl_cannot_shard(models: dict[bool, Path], tmp_path: Path, adapter: str) -> None:
    tied, options, said = REFUSED[adapter]
    model = with_adapter(models[tied], tmp_path, options)
    with pytest.raises(UnsupportedFeatureError, match=rf"{said}.*tie_word_embeddings={tied}\).*; (set|load)"):
        build_engine(models[tied], tree=TreeConfig(mode="tree"), model=model)


def test_gemma_3n_whose_layers_have_widths_of_their_own(tmp_path: Path) -> None:
    usual = sizes(vocab_size=97, intermediate_size=[40, 48] * 5, num_hidden_layers=10, sliding_window=7)
    own = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    own |= {"num_kv_shared_layers": 5, "activation_sparsity_pattern": [0.0] * 10}
    path = save_model(tmp_path, AutoConfig.for_model("gemma3n_text", **usual, **own))
    stock = alone(build_engine(path, tree=None, attention="eager"), ROWS)
    tree = build_engine(path, tree=TreeConfig(mode="tree", max_tokens=20), attention="eager")
    assert_trains_as(stock, tree, ROWS)
