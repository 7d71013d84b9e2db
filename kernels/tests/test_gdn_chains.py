"""Tiles and heavy chains: walking them in launch order hands every tile the state of its entry, written before."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_shapes import SHAPES, hang, layout_of, subtree_end_of, tries

from tree_kernels.parents import parents_of, segments_of
from tree_kernels.tree_gated_delta_rule.chains import INITIAL_SLOT, NONE, ChainPlan, plan_chains
from tree_kernels.tree_gated_delta_rule.tiles import tile_plan


def path_of(parent: list[int], token: int) -> frozenset[int]:
    path = []
    while token >= 0:
        path.append(token)
        token = parent[token]
    return frozenset(path)


def check(parent: list[int], most: int, wanted: tuple[int, ...] = ()) -> ChainPlan:
    """Walk the plan with sets of tokens for states: a state is what it has read."""
    layout = layout_of(parent)
    plan = plan_chains(tile_plan(layout, most, wanted))
    slots: dict[int, frozenset[int]] = {INITIAL_SLOT: frozenset()}
    seen: list[int] = []
    for level in plan.levels:
        chains = level.chains
        tiles = range(plan.chain_start[chains[0]], plan.chain_start[chains[-1] + 1])
        for chain in chains:
            state = slots[plan.chain_slot[chain]]
            first, last = plan.chain_start[chain : chain + 2]
            for tile in range(first, last):
                if plan.stored_slot[tile] != NONE:
                    assert plan.stored_slot[tile] == plan.entry_slot[tile]
                    assert plan.entry_slot[tile] not in slots
                    slots[plan.entry_slot[tile]] = state
                state = walk(plan, parent, tile, state, seen)
                assert (plan.main_row[tile] == NONE) == (tile == last - 1)
        for tile in tiles:
            for x in range(plan.side_start[tile], plan.side_start[tile + 1]):
                assert plan.side_slot[x] not in slots
                tokens = plan.token[tile]
                ancestors = visible(plan, tile, plan.side_row[x])
                slots[plan.side_slot[x]] = slots[plan.entry_slot[tile]] | {int(tokens[row]) for row in ancestors}
    assert sorted(seen) == list(range(len(parent)))
    assert set(slots) == set(range(plan.num_slots))
    assert [slots[slot] for slot in plan.wanted_slot] == [path_of(parent, token) for token in wanted]
    for slot in range(plan.num_slots):
        sources = plan.source[plan.source_start[slot] : plan.source_start[slot + 1]].tolist()
        starting = [chain for chain in range(len(plan.chain_slot)) if plan.chain_slot[chain] == slot]
        asked = [len(plan.chain_slot) + place for place, one in enumerate(plan.wanted_slot) if one == slot]
        assert sources == starting + asked
    assert len(plan.levels) - 1 <= math.log2(max(len(plan.main_row), 1))
    return plan


def visible(plan: ChainPlan, tile: int, row: int) -> list[int]:
    return [j for j in range(row + 1) if row < plan.row_end[tile, j]]


def walk(plan: ChainPlan, parent: list[int], tile: int, state: frozenset[int], seen: list[int]) -> frozenset[int]:
    """Check that the state and the rows a token sees are its path; return the state that continues the chain."""
    for row, token in enumerate(plan.token[tile]):
        if token == len(parent):
            assert plan.row_end[tile, row] == 0
            continue
        seen.append(int(token))
        rows = {int(plan.token[tile, j]) for j in visible(plan, tile, row)}
        assert not state & rows and state | rows == path_of(parent, int(token))
    main = plan.main_row[tile]
    return state if main == NONE else state | {int(plan.token[tile, j]) for j in visible(plan, tile, main)}


@settings(max_examples=40, deadline=None, database=None)
@given(parent=tries(70), most=st.integers(1, 12), data=st.data())
def test_chains_of_random_forests(parent: list[int], most: int, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(parent) - 1), max_size=4))
    check(parent, most, tuple(wanted))


@pytest.mark.parametrize("size", [1, 129])
@pytest.mark.parametrize("shape", SHAPES)
def test_chains_of_every_shape(shape: str, size: int) -> None:
    plan = check(SHAPES[shape](size), 16, (size - 1, 0))
    if shape == "chain":
        assert len(plan.chain_slot) == 1


def trunk_with_stubs(stubs: int, *, apart: int, stub: int) -> list[int]:
    parent = SHAPES["chain"](stubs * apart)
    for joint in reversed(range(apart - 1, stubs * apart, apart)):
        parent = hang(parent, joint, stub)
    return parent


def test_a_trunk_with_stubs_takes_two_levels() -> None:
    plan = check(trunk_with_stubs(8, apart=80, stub=70), 64)
    assert len(plan.levels) == 2 and plan.levels[0].chains == range(1)


@settings(max_examples=40, deadline=None, database=None)
@given(parent=tries(90, least=0))
def test_parents_and_segments_follow_from_subtree_ends(parent: list[int]) -> None:
    size = len(parent)
    end = subtree_end_of(parent).numpy()
    layout = layout_of(parent)
    assert parents_of(layout).tolist() == parent and parents_of(layout) is parents_of(layout)
    segments = segments_of(layout)
    starts = [token for token in range(size) if token == 0 or parent[token] != token - 1 or parent.count(token - 1) > 1]
    assert segments.start.tolist() == [*starts, size]
    assert segments.parent.tolist() == [parent[token] for token in starts]
    assert segments.start[segments.past].tolist() == end[starts].tolist()


def num_tiles(parent: list[int]) -> int:
    return len(tile_plan(layout_of(parent), 64, ()).token)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 129])
def test_a_chain_fills_its_tiles(size: int) -> None:
    assert num_tiles(SHAPES["chain"](size)) == -(-size // 64)


@pytest.mark.parametrize(("stub", "most_tiles"), [(1, 17), (5, 18), (15, 21)])
def test_stubs_of_a_few_tokens_do_not_occupy_a_tile_each(stub: int, most_tiles: int) -> None:
    # A trunk of 512 tokens with 512 / stub stubs off it: 16 full tiles, where a tile a segment would be 100 to 1024.
    assert num_tiles(trunk_with_stubs(512 // stub, apart=stub, stub=stub)) <= most_tiles
