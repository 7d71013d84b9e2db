"""The flat arm of the learning benchmark: verl's engine attends row by row, and sees what it sees of rows alone."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
    import swe_learning_rows

    yield swe_learning_rows
    transformer_impl.logprobs_from_logits = before


def test_log_probs_take_one_pass(rows: ModuleType) -> None:
    assert transformer_impl.logprobs_from_logits is fused_log_probs


def test_packed_rows_are_rows_alone(
    rows: ModuleType, model_path: Path, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = build_engine(model_path, tree=None, attention=rows.NAME)
    called = []
    original = rows.packed_attention
    monkeypatch.setattr(
        rows, "packed_attention", lambda *given, **more: called.append(given) or original(*given, **more)
    )
    shape = SHAPES["two_groups"]
    expected = alone(stock, shape)
    assert not called
    assert_trains_as(expected, packed, shape)
    assert len(called) >= 2 and any(len(given[3].lengths) == len(shape) for given in called), "rows end to end"


def test_padded_rows_are_refused_with_the_key(rows: ModuleType) -> None:
    with pytest.raises(ValueError, match="use_remove_padding=true"):
        rows.layout_of(torch.arange(4).expand(2, 4))
    assert rows.layout_of(torch.tensor([[0, 1, 2, 0, 0, 1]])).lengths == [3, 1, 2]
