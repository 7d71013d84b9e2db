"""A layout knows depth and past, and refuses what is no forest."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_shapes import SHAPES, chain, layout_of, subtree_end_of, tries

from tree_kernels import TreeLayout
from tree_kernels.tree_attention.block_lists import block_lists
from tree_kernels.tree_attention.fa4.fa4_plan import fa4_plan


@pytest.mark.parametrize("size", [0, 1, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_position_is_depth(shape: str, size: int) -> None:
    parent, depths = SHAPES[shape](size), []
    for above in parent:
        depths.append(0 if above < 0 else depths[above] + 1)
    layout = layout_of(parent, 7)
    assert layout.position.tolist() == depths
    assert layout.depth.tolist() == [7 + depth for depth in depths]
    assert layout.position.dtype == torch.int32 and layout.num_tokens == size


@settings(max_examples=30, deadline=None)
@given(tries(40), st.data())
def test_only_nested_subtrees_are_accepted(parent: list[int], data: st.DataObject) -> None:
    end, size = subtree_end_of(parent), len(parent)
    token = data.draw(st.integers(0, size - 1))
    end[token] = data.draw(st.integers(token + 1, size))
    spans = [(start, int(stop)) for start, stop in enumerate(end)]
    crossing = any(a < b < a_end < b_end for a, a_end in spans for b, b_end in spans)
    if crossing:
        with pytest.raises(ValueError, match="nested subtrees"):
            TreeLayout.from_subtree_end(end)
    else:
        assert TreeLayout.from_subtree_end(end).num_tokens == size


@pytest.mark.parametrize(
    ("end", "complaint"),
    [
        ([0], r"subtree_end\[0\]: expected a value in \[1, 1\]"),
        ([2, 3], r"\[0\]|\[1\]"),
        ([3, 1, 3], r"subtree_end\[1\]"),
    ],
)
def test_an_end_outside_the_forest_is_named(end: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TreeLayout.from_subtree_end(torch.tensor(end))


def test_floats_wrong_ranks_and_negative_pasts_are_refused() -> None:
    with pytest.raises(TypeError, match="integer"):
        TreeLayout.from_subtree_end(torch.ones(3))
    with pytest.raises(ValueError, match="shape"):
        TreeLayout.from_subtree_end(torch.ones(3, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="past_length"):
        TreeLayout.from_subtree_end(torch.tensor([1]), past_length=-1)


@pytest.mark.parametrize(
    ("made_of", "others"),
    [
        (lambda layout, key="key": layout.metadata(key, lambda own: [own.num_tokens]), ({"key": "other"},)),
        (partial(block_lists, query_block=64, key_block=64, by="key"), ({"window": 5},)),
        (partial(fa4_plan, head_size=128, heads=8, window=None), ({"heads": 4}, {"window": 9})),
    ],
)
def test_what_is_made_of_a_layout_is_made_once(made_of: Any, others: tuple[dict[str, Any], ...]) -> None:
    layout = layout_of(SHAPES["comb"](300))
    assert made_of(layout) is made_of(layout)
    assert all(made_of(layout, **other) is not made_of(layout) for other in others)


def test_the_layout_is_opaque() -> None:
    layout = layout_of(chain(5))
    assert torch.utils._pytree.tree_leaves({"tree_layout": layout}) == [layout]
    assert layout.to("cpu") is layout
