"""Models with multi-head latent attention in partitions of any size: keys and values of two sizes cross cuts."""

import pytest
import torch
from hybrid_models import build, float64_throughout, rows_with_prefix
from latent_models import latent_configs
from recurrent_gradients import assert_same_gradients, partitioned_gradients, row_gradients

from tree_rl.models import use_tree_attention

CONFIGS = latent_configs(initializer_range=0.1)


@pytest.mark.parametrize("capacity", (3, 16, 10_000))
@pytest.mark.parametrize("family", CONFIGS)
def test_every_budget_in_float64(family: str, capacity: int) -> None:
    rows = rows_with_prefix(20)
    with float64_throughout():
        model = build(CONFIGS[family], torch.float64)
        expected = row_gradients(model, rows)
        use_tree_attention(model)
        if capacity == 3:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same_gradients(partitioned_gradients(model, rows, capacity, offload=capacity == 16), expected)
