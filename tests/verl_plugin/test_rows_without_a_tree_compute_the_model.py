"""Where flash attention is missing, rows without a tree keep soft-caps and sinks: they equal stock eager rows."""

from pathlib import Path

import pytest
import torch
from engine_harness import VOCAB, build_engine, save_model
from equivalence import alone, assert_trains_as
from hostile_rows import SHAPES
from tiny_sizes import ROPE, sizes
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, PretrainedConfig, VaultGemmaConfig

from tree_rl.models.flat_attention import needs_eager
from tree_rl.verl_plugin.options import TreeConfig

SIZES = sizes(vocab_size=VOCAB, intermediate_size=48, initializer_range=0.3)
CAPPED = {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
FAMILIES: dict[str, PretrainedConfig] = {
    "gemma_2": Gemma2Config(**SIZES, **CAPPED),
    "vaultgemma": VaultGemmaConfig(**SIZES, **CAPPED),
    "gpt_oss": GptOssConfig(**SIZES, **EXPERTS, rope_parameters=ROPE),
}


@pytest.mark.parametrize(
    "family, attention, mode",
    (
        ("gemma_2", "flash_attention_2", "auto"),
        *(("gpt_oss", "sdpa", "auto"), ("gpt_oss", "flash_attention_2", "tree")),
        pytest.param("vaultgemma", "sdpa", "tree", marks=pytest.mark.slow),
    ),
)
def test_rows_equal_stock_verls_eager_rows(tmp_path: Path, family: str, attention: str, mode: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("flash attention may run here")
    path = save_model(tmp_path, FAMILIES[family])
    stock = build_engine(path, tree=None, attention="eager")
    tree = build_engine(path, tree=TreeConfig(mode=mode), attention=attention)
    for name in ("no_common_root", "branches"):
        assert_trains_as(alone(stock, SHAPES[name]), tree, SHAPES[name])
    assert 0 < tree.step.self_check.error < 2e-5


def test_eager_is_for_models_that_sdpa_does_not_compute() -> None:
    assert all(needs_eager(config) for config in FAMILIES.values())
    assert not needs_eager(LlamaConfig(**SIZES))
    assert not needs_eager(Gemma2Config(**{**SIZES, **CAPPED, "attn_logit_softcapping": None}))
