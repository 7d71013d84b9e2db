"""Models with short convolutions or Mamba 2 layers: a forest, whole or in partitions, has the log-probs and gradients
of its rows run alone through stock code."""

from functools import cache

import pytest
import torch
from hybrid_models import build, float64_throughout, rows_with_prefix
from recurrent_models import RECURRENT
from test_hybrid_models_read_trees import FLOAT32_TOLERANCE, Result, gradients
from test_hybrid_models_run_in_partitions import assert_same as assert_same_gradients
from test_hybrid_models_run_in_partitions import partitioned_gradients, row_gradients

from tree_rl.models import check_model, use_tree_attention
from tree_rl.models.support import leaks_when_packed
from tree_rl.training.rows_alone import branch_log_probs
from tree_rl.training.whole import forest_log_probs
from tree_rl.tree.forest import Forest


@cache
def stock_rows_in_float64(family: str, prefix: int) -> Result:
    with float64_throughout():
        model = build(RECURRENT[family], torch.float64)
        return gradients(model, branch_log_probs(model, rows_with_prefix(prefix)))


def tree(family: str, prefix: int, dtype: torch.dtype, *, checkpointing: bool = False) -> Result:
    model = build(RECURRENT[family], dtype)
    check_model(model)
    use_tree_attention(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return gradients(model, forest_log_probs(model, Forest.from_rows(rows_with_prefix(prefix))))


def assert_same(got: Result, expected: Result, tolerance: float) -> None:
    torch.testing.assert_close(got[0].double(), expected[0], rtol=tolerance, atol=tolerance)
    assert_same_gradients(got[1], expected[1], tolerance)


@pytest.mark.parametrize("family", RECURRENT)
def test_forest_in_float64_equals_rows_alone(family: str) -> None:
    with float64_throughout():
        got = tree(family, 65, torch.float64)
    assert got[0].dtype == torch.float64
    assert_same(got, stock_rows_in_float64(family, 65), 1e-10)


@pytest.mark.parametrize("family", RECURRENT)
def test_forest_in_float32_with_checkpointing_equals_rows_alone(family: str) -> None:
    got = tree(family, 65, torch.float32, checkpointing=True)
    assert_same(got, stock_rows_in_float64(family, 65), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("prefix", (1, 2, 3, 64))
@pytest.mark.parametrize("family", ("lfm2", "bamba"))
def test_prefixes_around_the_window_and_the_tile(family: str, prefix: int) -> None:
    assert_same(tree(family, prefix, torch.float32), stock_rows_in_float64(family, prefix), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("capacity", (3, 17, 1000))
@pytest.mark.parametrize("family", ("lfm2", "granite_4"))
def test_partitions_in_float64_equal_rows_alone(family: str, capacity: int) -> None:
    rows = rows_with_prefix(20)
    with float64_throughout():
        model = build(RECURRENT[family], torch.float64)
        expected = row_gradients(model, rows)
        use_tree_attention(model)
        assert_same_gradients(partitioned_gradients(model, rows, capacity, offload=capacity == 17), expected)


@pytest.mark.parametrize("family", RECURRENT)
def test_flat_calls_run_transformers_own_forward(family: str) -> None:
    model = build(RECURRENT[family], torch.float32)
    ids = torch.from_numpy(rows_with_prefix(20)[1])[None]
    before = model(input_ids=ids).logits
    use_tree_attention(model)
    forest_log_probs(model, Forest.from_rows(rows_with_prefix(3)))
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)


def test_rows_packed_into_one_sequence_would_see_each_other() -> None:
    for config in RECURRENT.values():
        model = build(config, torch.float32)
        assert leaks_when_packed(model)
        first, second = rows_with_prefix(20)[0], rows_with_prefix(20, seed=1)[1]
        packed = torch.cat([torch.from_numpy(row) for row in (first, second)])[None]
        positions = torch.cat([torch.arange(len(row)) for row in (first, second)])[None]
        logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0, len(first) :]
        alone = model(input_ids=torch.from_numpy(second)[None], use_cache=False).logits[0]
        assert not torch.allclose(logits, alone, atol=1e-4)
