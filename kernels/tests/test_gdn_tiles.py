"""Tiles of a forest; test_gdn_chains.py walks them, and recurrences in tiles of any size are those of rows."""

import pytest
from hypothesis import given, settings
from tree_shapes import SHAPES, subtree_end_of, tries

from tree_kernels.parents import parents_of, segments_of
from tree_kernels.tree_gated_delta_rule.tiles import tile_plan
from tree_kernels.tree_layout import TreeLayout


@settings(max_examples=40, deadline=None, database=None)
@given(parent=tries(90, least=0))
def test_parents_and_segments_follow_from_subtree_ends(parent: list[int]) -> None:
    size = len(parent)
    end = subtree_end_of(parent).numpy()
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    assert parents_of(layout).tolist() == parent and parents_of(layout) is parents_of(layout)
    segments = segments_of(layout)
    starts = [token for token in range(size) if token == 0 or parent[token] != token - 1 or parent.count(token - 1) > 1]
    assert segments.start.tolist() == [*starts, size]
    assert segments.parent.tolist() == [parent[token] for token in starts]
    assert segments.start[segments.past].tolist() == end[starts].tolist()


def num_tiles(parent: list[int]) -> int:
    return len(tile_plan(TreeLayout.from_subtree_end(subtree_end_of(parent)), 64, ()).token)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 129])
def test_a_chain_fills_its_tiles(size: int) -> None:
    assert num_tiles(SHAPES["chain"](size)) == -(-size // 64)


@pytest.mark.parametrize(("stub", "most_tiles"), [(1, 17), (5, 18), (15, 21)])
def test_stubs_of_a_few_tokens_do_not_occupy_a_tile_each(stub: int, most_tiles: int) -> None:
    # A trunk of 512 tokens with 512 / stub stubs off it: 16 full tiles, where a tile a segment would be 100 to 1024.
    turns = 512 // stub
    trunk = turns * stub
    parent = list(range(-1, trunk - 1))
    for turn in reversed(range(turns)):
        parent += [turn * stub + stub - 1, *range(len(parent), len(parent) + stub - 1)]
    assert num_tiles(parent) <= most_tiles
