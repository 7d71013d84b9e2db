"""Mixture-of-Experts models on trees: gradients of rows alone, and experts that see unique tokens only."""

import pytest
import torch
from dense_models import assert_reads_trees
from moe_models import (
    BIASED,
    EXPERTS,
    FAMILIES,
    LATENT,
    SIZES,
    SPARSE,
    assert_equal_gradients,
    build,
    gradients,
    weighted,
)
from tiny_sizes import BRANCHING
from transformers import OlmoeConfig, PhimoeConfig, PretrainedConfig, Qwen2MoeConfig

from tree_rl.models import use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest

WINDOWS: dict[str, PretrainedConfig] = {
    "qwen2_moe_window": Qwen2MoeConfig(
        **SIZES,
        **SPARSE,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=3,
    ),
    "phimoe_window": PhimoeConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=4, router_jitter_noise=0.0),
    "olmoe_window": OlmoeConfig(**SIZES, num_experts=EXPERTS, sliding_window=4),
}
"""Windows that only the mask has (Qwen2-MoE, PhiMoE), or only the layer's keyword (OLMoE)."""
ALL = {**FAMILIES, **WINDOWS, "glm4_moe": BIASED, **LATENT}
WITH_EXPERTS = [family for family in ALL if family != "youtu"]


@pytest.mark.parametrize(
    ("family", "shape"),
    sorted(
        {(family, list(BRANCHING)[at % len(BRANCHING)]) for at, family in enumerate(ALL)}
        | {(family, shape) for family in ("qwen3_moe", *LATENT) for shape in BRANCHING}
        | {(family, "branches") for family in WINDOWS}
    ),
)
def test_forest_equals_rows_alone(family: str, shape: str) -> None:
    assert_reads_trees(build(ALL[family], dtype=torch.float64), BRANCHING[shape])


@pytest.mark.parametrize(
    "family, experts", [(f, ("grouped_mm", "batched_mm")[at % 2]) for at, f in enumerate(WITH_EXPERTS)]
)
def test_every_experts_implementation(family: str, experts: str) -> None:
    rows = BRANCHING["branches"] + BRANCHING["identical_and_strict_prefix"]
    reference = build(ALL[family])
    expected = gradients(reference, weighted(branch_log_probs(reference, rows)))
    model = build(ALL[family], experts=experts)
    use_tree_attention(model)
    got = gradients(model, weighted(forest_log_probs(model, Forest.from_rows(rows))))
    assert_equal_gradients(got, expected)
