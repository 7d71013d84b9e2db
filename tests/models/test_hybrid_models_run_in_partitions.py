"""Models with recurrent layers, or with latent attention, in partitions of any size: states, and keys and values of two
sizes, cross cuts; gradients are those of the rows."""

from typing import Any

import pytest
import torch
from hybrid_models import HYBRIDS, build, float64_throughout, rows_with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_models import latent_configs
from recurrent_gradients import CONFIGS, assert_partitions_equal_rows, assert_same_gradients, partitioned, row_gradients
from transformers import Qwen3NextConfig

from tree_rl.models import use_tree_attention

LATENT = latent_configs(initializer_range=0.1)
ROWS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=12), min_size=1, max_size=5)
TWO_LAYERS = Qwen3NextConfig(
    **{
        **HYBRIDS["qwen3_next"].to_dict(),
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1],
    }
)


@pytest.mark.parametrize(
    ("family", "capacity"),
    (
        *(("qwen3_next", capacity) for capacity in (3, 5, 17)),
        *(("lfm2", 3), ("granite_4", 17), ("nemotron_h", 16), ("falcon_h1", 3), ("zamba2", 3)),
    ),
)
def test_every_budget_in_float64(family: str, capacity: int) -> None:
    rows, preview, offload = rows_with_prefix(20), capacity == 5, capacity == 17
    assert_partitions_equal_rows(CONFIGS[family], rows, capacity, preview=preview, offload=offload)


@pytest.mark.parametrize(
    ("family", "capacity"), (("qwen3_5", 3), ("qwen3_5_moe", 40), ("nemotron_h", 3), ("falcon_h1", 16), ("zamba2", 16))
)
def test_other_families_with_checkpointing_and_offloading(family: str, capacity: int) -> None:
    assert_partitions_equal_rows(CONFIGS[family], rows_with_prefix(30), capacity, checkpointing=True, offload=True)


@pytest.mark.parametrize("capacity", (3, 16, 10_000))
@pytest.mark.parametrize("family", LATENT)
def test_every_budget_of_latent_attention(family: str, capacity: int) -> None:
    checkpointing, offload = capacity == 3, capacity == 16
    assert_partitions_equal_rows(
        LATENT[family], rows_with_prefix(20), capacity, checkpointing=checkpointing, offload=offload
    )


@pytest.fixture(scope="module")
def two_layers() -> Any:
    return build(TWO_LAYERS, torch.float64)


@settings(max_examples=12, deadline=None, database=None)
@given(rows=ROWS, capacity=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_any_rows_any_budget(two_layers: Any, rows: list[list[int]], capacity: int, seed: int) -> None:
    with float64_throughout():
        expected = row_gradients(two_layers, rows)
        use_tree_attention(two_layers)
        got = partitioned(two_layers, rows, capacity, offload=seed % 2 == 0)
        assert_same_gradients(got, expected, 1e-10)
