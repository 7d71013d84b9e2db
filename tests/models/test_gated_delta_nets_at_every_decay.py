"""In bf16 a forest is no further from the truth than stock rows are; kernels/tests has every decay in float32."""

import math
from typing import Any

import pytest
import torch
from hybrid_models import HYBRIDS, build, float64_throughout, rows_with_prefix
from recurrent_gradients import gradients

from tree_rl.models import use_tree_attention
from tree_rl.training.loss.edges import forest_log_probs
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.tree.forest import Forest


def model_with_decay(family: str, decay: float, dtype: torch.dtype, *, seed: int = 0) -> Any:
    """Every head forgets by `decay` (natural logarithm, about) a token."""
    model = build(HYBRIDS[family], dtype, seed=seed)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, math.log(decay))
        if name.endswith("dt_bias"):
            # softplus of it is one.
            torch.nn.init.constant_(parameter, math.log(math.e - 1))
    return model


def squared_errors(family: str, seed: int) -> tuple[float, float]:
    """Of all gradients of one batch in bf16: the forest's, and stock rows'."""
    rows = rows_with_prefix(20, seed=seed)

    def model() -> Any:
        return model_with_decay(family, 0.2, torch.bfloat16, seed=seed)

    with float64_throughout():
        exact = model().double()
        truth = gradients(exact, branch_log_probs(exact, rows))[1]
    flat, forest = model(), model()
    use_tree_attention(forest)
    of_flat = gradients(flat, branch_log_probs(flat, rows))[1]
    of_forest = gradients(forest, forest_log_probs(forest, Forest.from_rows(rows)))[1]
    forest_error, flat_error = (
        sum(float((got[name] - true).square().sum() / true.square().sum()) for name, true in truth.items())
        for got in (of_forest, of_flat)
    )
    return forest_error, flat_error


@pytest.mark.slow
def test_bfloat16_is_no_further_off_than_stock_rows() -> None:
    # No experts: one token that bf16 routes elsewhere outweighs all rounding, on either side.
    errors = [squared_errors("qwen3_5", seed) for seed in range(8)]
    of_forest, of_flat = (sum(squared) for squared in zip(*errors, strict=True))
    assert of_forest <= of_flat
