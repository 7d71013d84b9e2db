"""Models with multi-head latent attention in partitions of any size: keys and values of two sizes cross cuts."""

import pytest
from hybrid_models import rows_with_prefix
from latent_models import latent_configs
from recurrent_gradients import assert_partitions_equal_rows

CONFIGS = latent_configs(initializer_range=0.1)


@pytest.mark.parametrize("capacity", (3, 16, 10_000))
@pytest.mark.parametrize("family", CONFIGS)
def test_every_budget_in_float64(family: str, capacity: int) -> None:
    rows, checkpointing, offload = rows_with_prefix(20), capacity == 3, capacity == 16
    assert_partitions_equal_rows(CONFIGS[family], rows, capacity, checkpointing=checkpointing, offload=offload)
