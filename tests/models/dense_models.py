"""Tiny dense models of every family, and some rows of a tree for them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import moe_models
import numpy as np
import torch
from equal_gradients import with_gradients
from hybrid_models import float64_throughout
from tiny_sizes import ROPE, VOCAB, config_of, sizes
from transformers import PretrainedConfig

from tree_rl.models import check_model, use_edge_head, use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

Rows = Sequence[Sequence[int] | np.ndarray]
SIZES = sizes(attention_dropout=0.0, initializer_range=0.3)


def dbrx(**experts: Any) -> PretrainedConfig:
    """A config whose settings are nested."""
    attention = {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 1e4, "attn_pdrop": 0.0}
    layers = {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, **experts}
    own = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB, "max_seq_len": 256}
    return config_of("dbrx", **own, attn_config=attention, ffn_config=layers, resid_pdrop=0.0, emb_pdrop=0.0)


WINDOW = {**SIZES, "sliding_window": 5}
SOFTCAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": config_of("llama", **SIZES),
    "qwen2": config_of("qwen2", **SIZES),
    "qwen3": config_of("qwen3", **SIZES, tie_word_embeddings=True),
    "mistral_window": config_of("mistral", **WINDOW),
    "gemma2_softcap": config_of("gemma2", **WINDOW, **SOFTCAPS, query_pre_attn_scalar=8),
    "gemma3_window": config_of("gemma3_text", **WINDOW, query_pre_attn_scalar=8),
    "gpt_oss_sinks": config_of("gpt_oss", **WINDOW, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE),
    "qwen3_moe": config_of("qwen3_moe", **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "dbrx": dbrx(),
}
build = partial(moe_models.build, dtype=torch.float64)


def some_rows() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    trunk = draw.integers(1, VOCAB, 9)
    rows = [
        np.concatenate([trunk[:cut], draw.integers(1, VOCAB, more)]) for cut, more in ((9, 3), (9, 8), (4, 6), (9, 0))
    ]
    return [*rows, draw.integers(1, VOCAB, 5), rows[0]]


def assert_reads_trees(model: torch.nn.Module, rows: Rows | None = None, *, has_head: bool = False) -> None:
    """Log-probs and gradients of a forest are those of its rows run alone, before the model read trees."""
    rows = some_rows() if rows is None else rows
    with float64_throughout():
        expected, wanted = with_gradients(model, branch_log_probs(model, rows))
        check_model(model)
        use_tree_attention(model)
        assert not has_head or use_edge_head(model) is None
        got, found = with_gradients(model, forest_log_probs(model, Forest.from_rows(rows)))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    compared = {name: reference for name, reference in wanted.items() if reference.norm() > 1e-9}
    assert compared
    for name, reference in compared.items():
        assert float((found[name] - reference).norm() / reference.norm()) < 1e-10, name
