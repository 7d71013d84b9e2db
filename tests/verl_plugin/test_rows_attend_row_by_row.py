"""Stock verl's arm of whole steps on a CPU attends row by row, and sees what it sees of rows alone."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_harness import build_engine
from equivalence import alone, assert_trains_as
from hostile_rows import SHAPES

from tree_rl.benchmark.against_verl.without_flash_attention_2 import fused_log_probs
from tree_rl.verl_plugin.compat import transformer_impl


@pytest.fixture(scope="module")
def rows() -> Iterator[ModuleType]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    before = transformer_impl.logprobs_from_logits
    from scripted_steps import row_by_row

    yield row_by_row
    transformer_impl.logprobs_from_logits = before


def test_log_probs_take_one_pass(rows: ModuleType) -> None:
    assert transformer_impl.logprobs_from_logits is fused_log_probs


def test_packed_rows_are_rows_alone(rows: ModuleType, model_path: Path, stock: Any) -> None:
    packed, shape = build_engine(model_path, tree=None, attention=rows.NAME), SHAPES["two_groups"]
    with patch.object(rows, "packed_attention", wraps=rows.packed_attention) as attention:
        expected = alone(stock, shape)
        assert not attention.called
        assert_trains_as(expected, packed, shape)
    assert attention.call_count >= 2
    assert any(len(call.args[3].lengths) == len(shape) for call in attention.call_args_list), "rows end to end"


def test_padded_rows_are_refused_with_the_key(rows: ModuleType) -> None:
    with pytest.raises(ValueError, match="use_remove_padding=true"):
        rows.layout_of(torch.arange(4).expand(2, 4))
    assert rows.layout_of(torch.tensor([[0, 1, 2, 0, 0, 1]])).lengths == [3, 1, 2]
