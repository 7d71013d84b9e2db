"""Tiles cover a forest: every token once, one entry each, states leave exactly where they are read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_shapes import SHAPES, random_trie, subtree_end_of

from tree_kernels.parents import parents_of, segments_of
from tree_kernels.tree_gated_delta_rule.tiles import START, TilePlan, plan_tiles
from tree_kernels.tree_layout import TreeLayout

FORESTS = {
    "size": st.integers(0, 90),
    "seed": st.integers(0, 10**6),
    "branching": st.sampled_from([0.0, 0.05, 0.3, 0.7]),
    "roots": st.integers(1, 4),
}


def check(parent: list[int], most: int, wanted: tuple[int, ...] = ()) -> TilePlan:
    end = subtree_end_of(parent).numpy()
    plan = plan_tiles(segments_of(TreeLayout.from_subtree_end(subtree_end_of(parent))), most, wanted)
    tiles = [[int(token) for token in row if token < len(parent)] for row in plan.token]
    assert sorted(token for tile in tiles for token in tile) == list(range(len(parent)))
    depth = np.repeat(np.arange(len(plan.depth_start) - 1), np.diff(plan.depth_start))
    assert len(depth) == len(tiles)
    read = set(wanted)
    for number, tile in enumerate(tiles):
        assert 0 < len(tile) <= most and tile == sorted(tile)
        assert plan.tile_of_token[tile].tolist() == [number] * len(tile)
        assert plan.row_of_token[tile].tolist() == list(range(len(tile)))
        row_end = [sum(other < end[token] for other in tile) for token in tile]
        assert plan.row_end[number].tolist() == row_end + [0] * (len(plan.token[number]) - len(tile))
        entries = {parent[token] for token in tile if parent[token] not in tile}
        assert len(entries) == 1, "a tile is entered by one state"
        (entry,) = entries
        if entry < 0:
            assert plan.entry[number] == START and depth[number] == 0
        else:
            assert plan.exit_token[plan.entry[number]] == entry
            assert depth[plan.tile_of_token[entry]] == depth[number] - 1
            read.add(entry)
    assert sorted(plan.exit_token.tolist()) == sorted(read)
    places = list(zip(plan.tile_of_token[plan.exit_token], plan.row_of_token[plan.exit_token], strict=True))
    assert places == sorted(places)
    assert plan.exit_token[plan.wanted].tolist() == list(wanted)
    return plan


@settings(max_examples=40, deadline=None, database=None)
@given(most=st.integers(1, 20), data=st.data(), **FORESTS)
def test_tiles_of_random_forests(
    size: int, seed: int, branching: float, roots: int, most: int, data: st.DataObject
) -> None:
    parent = random_trie(size, seed, branching=branching, roots=roots)
    wanted = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=4)) if size else []
    check(parent, most, tuple(wanted))


@settings(max_examples=40, deadline=None, database=None)
@given(**FORESTS)
def test_parents_and_segments_follow_from_subtree_ends(size: int, seed: int, branching: float, roots: int) -> None:
    parent = random_trie(size, seed, branching=branching, roots=roots)
    end = subtree_end_of(parent).numpy()
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    assert parents_of(layout).tolist() == parent
    segments = segments_of(layout)
    starts = [token for token in range(size) if token == 0 or parent[token] != token - 1 or parent.count(token - 1) > 1]
    assert segments.start.tolist() == [*starts, size]
    assert segments.parent.tolist() == [parent[token] for token in starts]
    assert segments.start[segments.past].tolist() == end[starts].tolist()


@pytest.mark.parametrize("size", [0, 1, 63, 65, 129])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_every_shape(shape: str, size: int) -> None:
    parent = SHAPES[shape](size)
    plan = check(parent, 64)
    if shape == "chain":
        assert len(plan.token) == -(-size // 64)
    layout = TreeLayout.from_subtree_end(subtree_end_of(parent))
    assert parents_of(layout).tolist() == parent and parents_of(layout) is parents_of(layout)


@pytest.mark.parametrize(("stub", "most_tiles"), [(1, 17), (5, 18), (15, 21)])
def test_stubs_of_a_few_tokens_do_not_occupy_a_tile_each(stub: int, most_tiles: int) -> None:
    # A trunk of 512 tokens with 512 / stub stubs off it: 16 full tiles, where a tile a segment would be 100 to 1024.
    turns = 512 // stub
    trunk = turns * stub
    parent = list(range(-1, trunk - 1))
    for turn in reversed(range(turns)):
        parent += [turn * stub + stub - 1, *range(len(parent), len(parent) + stub - 1)]
    assert len(check(parent, 64).token) <= most_tiles
