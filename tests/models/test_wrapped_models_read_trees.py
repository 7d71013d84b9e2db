"""Models that also read images run rows of text on their language model: as the whole model runs each row alone."""

import numpy as np
import pytest
import torch
from test_models_read_trees import some_rows
from wrapped_models import wrapped_config, wrapped_model

from tree_rl.models import check_model, use_edge_head, use_tree_attention
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.training.whole import forest_log_probs
from tree_rl.tree.forest import Forest

READABLE = (
    *("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "ministral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    *("qwen3_vl_moe", "glm4v", "glm46v", "glm4v_moe", "llava", "internvl", "aya_vision", "idefics3", "lfm2_vl"),
)


@pytest.mark.parametrize("tied", (False, True))
@pytest.mark.parametrize("family", READABLE)
def test_a_forest_of_text_is_the_whole_model_on_rows_alone(family: str, tied: bool) -> None:
    model = wrapped_model(wrapped_config(family, tied=tied)).double()
    rows = some_rows()
    expected = branch_log_probs(model, rows)
    weight = torch.from_numpy(np.random.default_rng(1).normal(size=len(expected)))
    parameters = dict(model.named_parameters())
    wanted = torch.autograd.grad((expected * weight).sum(), parameters.values(), allow_unused=True)

    check_model(model)
    use_tree_attention(model)
    assert use_edge_head(model) is None
    got = forest_log_probs(model, Forest.from_rows(rows))
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((got * weight).sum(), parameters.values(), allow_unused=True)
    assert any(gradient is not None for gradient in gradients)
    for name, gradient, reference in zip(parameters, gradients, wanted, strict=True):
        if reference is not None and reference.norm() > 1e-9:
            assert gradient is not None, name
            assert float((gradient - reference).norm() / reference.norm()) < 1e-5, name
