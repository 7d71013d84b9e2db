"""Cut lists name every item once, no piece is longer than its share, and there are no more pieces than the bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_shapes import SHAPES, layout_of

from tree_kernels.tree_attention.block_lists import block_lists
from tree_kernels.tree_attention.triton_kernels.key_pieces import (
    PIECES_PER_PROGRAM,
    SHORTEST_PIECE,
    KeyPieces,
    cut,
    key_pieces,
)


def check(items: list[int], most_cuts: int) -> KeyPieces:
    pieces = cut(torch.tensor(items, dtype=torch.int32), most_cuts)
    blocks = len(items)
    assert pieces.block.shape[0] == blocks + most_cuts and pieces.num_slots == 2 * most_cuts
    longest = max(SHORTEST_PIECE, -(-sum(items) // most_cuts))
    done: list[list[int]] = [[] for _ in items]
    slots: list[list[int]] = [[] for _ in items]
    for block, first, stop, slot in zip(
        *(t.tolist() for t in (pieces.block, pieces.first_item, pieces.stop_item, pieces.slot)), strict=True
    ):
        if block == blocks:
            continue
        assert stop - first <= longest
        done[block] += range(first, stop)
        slots[block].append(slot)
    assert done == [list(range(count)) for count in items]
    starts = zip(pieces.first_slot.tolist(), pieces.slot_count.tolist(), strict=True)
    for block, (first_slot, slot_count) in enumerate(starts):
        expected = list(range(first_slot, first_slot + slot_count)) if slot_count else [-1]
        assert slots[block] == expected
        assert slot_count == 0 or slot_count > 1
    used = [slot for of_block in slots for slot in of_block if slot >= 0]
    assert len(set(used)) == len(used) and all(slot < pieces.num_slots for slot in used)
    return pieces


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 60))
def test_every_item_is_in_one_piece(items: list[int], most_cuts: int) -> None:
    check(items, most_cuts)


def test_a_block_seen_by_all_is_cut_and_even_blocks_are_not() -> None:
    assert check([1000] + [10] * 100, 16).slot_count.tolist() == [8] + [0] * 100
    assert not check([50] * 40, 16).slot_count.any()
    assert not check([5], 1000).slot_count.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_of_a_layout_are_cut_once(shape: str) -> None:
    layout = layout_of(SHAPES[shape](500))
    lists = block_lists(layout, query_block=16, key_block=16, by="key")
    pieces = key_pieces(layout, lists, key_heads=2, programs=4)
    assert pieces is key_pieces(layout, lists, key_heads=2, programs=4)
    assert pieces.num_slots == 2 * 4 * PIECES_PER_PROGRAM // 2
    items = (lists.full_count + lists.partial_count).tolist()
    check(items, 4 * PIECES_PER_PROGRAM // 2)
