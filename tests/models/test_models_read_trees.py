"""Every supported model family, in float64: log-probs and gradients of a forest are those of its rows run alone."""

import pytest
import torch
from dense_models import FAMILIES, SIZES, assert_reads_trees, build, some_rows
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

from tree_rl.models import UnsupportedModelError, check_model, use_tree_attention


@pytest.mark.parametrize("family", FAMILIES)
def test_forest_equals_rows_alone(family: str) -> None:
    assert_reads_trees(build(FAMILIES[family]))


def test_flat_calls_keep_their_attention() -> None:
    model = build(FAMILIES["mistral_window"])
    ids = torch.tensor([some_rows()[1].tolist()])
    before = model(input_ids=ids).logits
    assert use_tree_attention(model) == "eager"
    assert use_tree_attention(model) == "eager"
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)


def test_length_dependent_rope_is_refused_by_name() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="rope_type=dynamic"):
        check_model(build(LlamaConfig(**SIZES, rope_parameters=rope)))


def test_router_auxiliary_loss_is_refused_by_name() -> None:
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    with pytest.raises(UnsupportedModelError, match=r"output_router_logits=False, and tree\.router_aux_loss_coef"):
        check_model(build(Qwen3MoeConfig(**sizes, output_router_logits=True)))


def test_router_noise_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"router_jitter_noise=0\.1: branches would share"):
        check_model(build(MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1)))
