"""A forest's rows of leaves: every token asks once, along its whole path, and copies' gradients come together."""

import pytest
import torch
from hypothesis import given, settings
from tree_shapes import SHAPES, layout_of, paths_of, rows, subtree_end_of, tries

from tree_kernels import TreeLayout
from tree_kernels.tree_attention.fa4.leaf_rows import LeafRows, along_paths, leaf_rows


def every_row(layout: TreeLayout) -> LeafRows | None:
    return leaf_rows(layout, most_keys=float("inf"), fewest_queries=0)


def check(parent: list[int]) -> None:
    found = every_row(layout_of(parent))
    assert found is not None
    paths = paths_of(parent)
    copies = found.copies
    tokens = torch.arange(len(parent)) if copies is None else copies.token
    keys = [piece.tolist() for piece in tokens.split(found.key_offsets.diff().tolist())]
    assert keys == paths
    own = [piece.tolist() for piece in torch.arange(len(parent)).split(found.query_offsets.diff().tolist())]
    assert all(path[len(path) - len(mine) :] == mine for path, mine in zip(paths, own, strict=True))
    assert found.longest_key == max(map(len, paths)) and found.longest_query == max(map(len, own))
    assert (copies is None) == (sum(map(len, paths)) == len(parent))


@pytest.mark.parametrize("size", [1, 3, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_hold_whole_paths_and_ask_for_what_is_new(shape: str, size: int) -> None:
    check(SHAPES[shape](size))


@settings(max_examples=30, deadline=None)
@given(tries(60))
def test_rows_of_any_forest(parent: list[int]) -> None:
    check(parent)


def test_limits_count_keys_and_queries() -> None:
    parent = SHAPES["trunk_and_stubs"](60)
    layout = layout_of(parent)
    paths = paths_of(parent)
    keys, queries = sum(map(len, paths)) / 60, 60 / len(paths)
    assert leaf_rows(layout, most_keys=keys, fewest_queries=queries) is not None
    assert leaf_rows(layout, most_keys=keys - 1e-6, fewest_queries=queries) is None
    assert leaf_rows(layout, most_keys=keys, fewest_queries=queries + 1e-6) is None
    assert leaf_rows(layout_of(rows(1, 2)), most_keys=1, fewest_queries=9) is not None


def test_data_on_a_device_is_not_read_but_told() -> None:
    end = subtree_end_of(rows(3, 1, 7))
    assert every_row(TreeLayout.from_subtree_end(end.to("meta"))) is None
    told = every_row(TreeLayout.from_subtree_end(end.to("meta"), on_host=end.numpy()))
    assert told is not None and told.longest_key == 7 and told.key_offsets.device.type == "meta"
    moved = every_row(TreeLayout.from_subtree_end(end).to("meta"))
    assert moved is not None and moved.query_offsets.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_copies_are_summed_before_they_are_rounded(dtype: torch.dtype) -> None:
    layout = layout_of(SHAPES["star"](200))
    found = every_row(layout)
    assert found is not None and found.copies is not None
    torch.manual_seed(0)
    keys = torch.randn(200, 2, 4, dtype=dtype, requires_grad=True)
    of_paths = along_paths(keys, found.copies)
    assert torch.equal(of_paths, keys[found.copies.token])
    grad = torch.randn_like(of_paths)
    own = torch.autograd.grad(of_paths, keys, grad)[0]
    exact = torch.zeros(200, 2, 4, dtype=torch.float64).index_add_(0, found.copies.token, grad.double())
    assert own.dtype == dtype
    torch.testing.assert_close(own.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-14, atol=1e-5)
