"""Where flash attention is missing, rows without a tree keep soft-caps and sinks: they equal stock eager rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import VOCAB, build_engine, ppo_batch, save_model
from equivalence import actor_loss, assert_equal_runs, run, wanted_positions
from hostile_rows import shapes
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, PretrainedConfig, VaultGemmaConfig

from tree_rl.models.flat_attention import needs_eager
from tree_rl.verl_plugin.options import TreeConfig

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
CAPPED = {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
FAMILIES: dict[str, PretrainedConfig] = {
    "gemma_2": Gemma2Config(**SIZES, **CAPPED),
    "vaultgemma": VaultGemmaConfig(**SIZES, **CAPPED),
    "gpt_oss": GptOssConfig(**SIZES, **EXPERTS, rope_parameters=ROPE),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ("flash_attention_2", "sdpa"))
@pytest.mark.parametrize("mode", ("tree", "auto"))
def test_rows_equal_stock_verls_eager_rows(tmp_path: Path, family: str, attention: str, mode: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("flash attention may run here")
    path = save_model(tmp_path, FAMILIES[family])
    loss, shared = actor_loss("vanilla", "token-mean"), {"calculate_entropy": True, "return_model_output": True}
    stock, tree = (
        build_engine(path, tree=None, attention="eager"),
        build_engine(path, tree=TreeConfig(mode=mode), attention=attention),
    )
    for name in ("no_common_root", "branches"):
        rows: Any = shapes()[name]
        alone = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
        expected = run(stock, ppo_batch(rows, **shared, **alone), loss)
        received = run(tree, ppo_batch(rows, **shared), loss)
        assert_equal_runs(expected, received, wanted_positions(ppo_batch(rows)), ("log_probs", "entropy"))
    assert 0 < tree.step.self_check.error < 2e-5


def test_eager_is_for_models_that_sdpa_does_not_compute() -> None:
    assert all(needs_eager(config) for config in FAMILIES.values())
    assert not needs_eager(LlamaConfig(**SIZES))
    assert not needs_eager(Gemma2Config(**{**SIZES, **CAPPED, "attn_logit_softcapping": None}))
