"""On Hopper `auto` takes what was measured to be fastest there, as far as the plan can tell forests apart."""

import csv
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tree_kernels import TreeLayout
from tree_kernels.tree_attention import api
from tree_kernels.tree_attention.auto_order import PARTIAL_SHARE, order_on_hopper
from tree_kernels.tree_attention.block_lists import block_lists

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")
BF16 = {"device": CUDA, "dtype": torch.bfloat16, "head_size": 128}


def measured() -> dict[tuple[str, int], dict[str, float]]:
    """(shape, unique tokens) -> median milliseconds forward and backward of each implementation, one H200."""
    table: dict[tuple[str, int], dict[str, float]] = {}
    with (ROOT / "docs" / "benchmarks" / "attention.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["contender"].startswith("tree ") and row["total_ms"] and row["heads"] == "qwen3-8b":
                case = table.setdefault((row["shape"], int(row["unique_tokens"])), {})
                case[row["contender"].removeprefix("tree ")] = float(row["total_ms"])
    return {case: times for case, times in table.items() if {"fa4", "triton"} <= set(times)}


def fastest(times: dict[str, float]) -> str:
    """The implementation of the shortest time."""
    return min(times, key=lambda impl: times[impl])


@pytest.mark.parametrize("case", measured(), ids=str)
def test_auto_is_the_fastest_that_was_measured(case: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "kernels")
    shape, tokens = case
    end = torch.from_numpy(import_module("forest_shapes").SHAPES[shape](tokens).forest().subtree_end)
    lists = block_lists(TreeLayout.from_subtree_end(end), query_block=128, key_block=128, by="query")
    partial, full = int(lists.partial_count.sum()), int(lists.full_count.sum())
    order = order_on_hopper(head_size=128, partial_share=partial / (partial + full))
    assert order[0] == fastest(measured()[case])


def test_both_answers_of_the_rule_were_measured_and_what_was_not_runs_flash_attention() -> None:
    assert {fastest(times) for times in measured().values()} == {"fa4", "triton"}
    for head_size, share in ((128, None), (128, 0.0), (128, PARTIAL_SHARE - 0.01), (64, 1.0), (256, 1.0)):
        assert order_on_hopper(head_size=head_size, partial_share=share)[0] == "fa4"


def test_what_cannot_run_on_hopper_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: set[str] = set()
    monkeypatch.setattr(api, "measured_on", lambda device: True)
    monkeypatch.setattr(api, "unavailable_reason", lambda impl, **wanted: "absent" if impl in absent else None)
    assert api.chosen_implementation(**BF16, partial_share=0.1) == "fa4"
    for expected in ("triton", "fa4", "flex"):
        assert api.chosen_implementation(**BF16, partial_share=0.9) == expected
        absent.add(expected)


def test_a_layout_keeps_its_share_on_the_way_to_a_device() -> None:
    layout = TreeLayout.from_subtree_end(torch.tensor([3, 2, 3]), partial_share=0.75)
    assert layout.to("meta").partial_share == 0.75
    assert TreeLayout.from_subtree_end(torch.tensor([1])).partial_share is None
    with pytest.raises(ValueError, match=r"partial_share: expected a value in \[0, 1\]"):
        TreeLayout.from_subtree_end(torch.tensor([1]), partial_share=12.0)


@pytest.mark.parametrize(
    ("ends", "past", "window", "share"),
    [
        ([3, 2, 3], 0, None, 0.75),
        ([3, 2, 3], 0, 2, None),  # Blocks are counted without a window.
        (range(1, 201), 0, None, None),  # Rows that share nothing visit no partial blocks.
        (range(1, 201), 1, None, 0.75),
    ],
)
def test_attention_tells_auto_what_the_layout_knows(
    ends: Sequence[int], past: int, window: int | None, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Mock(return_value="sdpa")
    monkeypatch.setattr(api, "chosen_implementation", chosen)
    q, behind = torch.zeros(len(ends), 2, 16), torch.zeros(past, 2, 16) if past else None
    layout = TreeLayout.from_subtree_end(torch.tensor(ends), past_length=past, partial_share=0.75)
    api.tree_attention(q, q, q, layout, past_k=behind, past_v=behind, window=window)
    assert [call.kwargs["partial_share"] for call in chosen.call_args_list] == [share]
