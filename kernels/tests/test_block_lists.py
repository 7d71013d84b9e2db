"""Block lists, FlexAttention's too, are the dense mask's: nothing visible is skipped, nothing masked is called full."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from tree_shapes import SHAPES, layout_of, tries

from tree_kernels import TreeLayout
from tree_kernels.tree_attention.block_lists import KEY_PADDING, BlockLists, block_lists, key_depths, key_ends
from tree_kernels.tree_attention.portable.flex import BLOCK, tree_block_mask
from tree_kernels.tree_attention.reference import visible_mask


def dense(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """bool [R, C] of listed blocks, after checking that a list is ascending and names every block once."""
    listed = torch.zeros(index.shape, dtype=torch.bool)
    for row, length in enumerate(count.tolist()):
        columns = index[row, :length].long()
        assert columns.tolist() == sorted(columns.tolist())
        assert sorted(index[row].tolist()) == list(range(index.shape[1]))
        listed[row, columns] = True
    return listed


def check(layout: TreeLayout, query_block: int, key_block: int, window: int | None) -> None:
    mask = visible_mask(layout, window=window)
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % key_block, 0, -mask.shape[0] % query_block))
    tiles = padded.view(padded.shape[0] // query_block, query_block, padded.shape[1] // key_block, key_block)
    # Blocks with a visible pair; blocks whose pairs are all visible, none of them padding.
    some, every = tiles.any(3).any(1), tiles.all(3).all(1)
    found = []
    for by in ("query", "key"):
        lists = block_lists(layout, query_block=query_block, key_block=key_block, by=by, window=window)
        assert isinstance(lists, BlockLists)
        for t in (lists.full_count, lists.full_index, lists.partial_count, lists.partial_index):
            assert t.dtype == torch.int32 and t.is_contiguous()
        full, partial = dense(lists.full_count, lists.full_index), dense(lists.partial_count, lists.partial_index)
        found.append((full, partial) if by == "query" else (full.T, partial.T))
    full, partial = found[0]
    assert torch.equal(full, found[1][0]) and torch.equal(partial, found[1][1])
    assert not (full & partial).any()
    if window is None:
        assert torch.equal(full, every) and torch.equal(full | partial, some)
    else:
        assert not (full & ~every).any(), "a block that is masked in part is taken for full"
        assert not (some & ~full & ~partial).any(), "a block with visible keys is skipped"


@settings(max_examples=40, deadline=None, database=None)
@given(
    parent=tries(90),
    past=st.integers(0, 40),
    blocks=st.tuples(st.sampled_from([1, 2, 4, 8, 32]), st.sampled_from([1, 2, 8, 16, 64])),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_lists_of_random_forests_are_those_of_the_dense_mask(
    parent: list[int], past: int, blocks: tuple[int, int], window: int | None
) -> None:
    check(layout_of(parent, past), *blocks, window)


@pytest.mark.parametrize(("size", "past"), [(0, 1), (1, 64), (63, 0), (64, 77), (129, 64), (400, 77)])
@pytest.mark.parametrize("shape", SHAPES)
def test_lists_of_every_shape_and_ragged_length(shape: str, size: int, past: int) -> None:
    layout = layout_of(SHAPES[shape](size), past)
    for window in (None, 30):
        check(layout, 64, 64, window)
        check(layout, 32, 128, window)


def test_a_window_leaves_out_most_of_a_long_chain() -> None:
    layout = layout_of(SHAPES["chain"](4096))
    # 200 tokens back: the block itself and one or two before it, of which none lies near enough to be full.
    for window, full, partial in ((None, 32 * 31 // 2, 32), (200, 0, 32 + 31 + 30), (256, 31, 32 + 30)):
        lists = block_lists(layout, query_block=128, key_block=128, by="query", window=window)
        assert (int(lists.full_count.sum()), int(lists.partial_count.sum())) == (full, partial)


@pytest.mark.parametrize("past", [0, 1, 130])
def test_key_vectors_hold_ends_and_depths_in_key_coordinates(past: int) -> None:
    layout = layout_of(SHAPES["forest"](100), past)
    ends, depths = key_ends(layout), key_depths(layout)
    assert ends.shape == depths.shape and ends.shape[0] % KEY_PADDING == 0
    query = past + torch.arange(100)[:, None]
    key = torch.arange(ends.shape[0])
    seen = (key <= query) & (query < ends)
    assert torch.equal(seen[:, : past + 100], visible_mask(layout)) and not seen[:, past + 100 :].any()
    assert depths[: past + 100].tolist() == [*range(past), *layout.depth.tolist()]


@pytest.mark.parametrize(
    ("shape", "size", "past", "window"),
    [
        *(("chain", 640, 200, 40), ("star", 640, 0, None), ("trunk_and_stubs", 640, 0, 40)),
        *(("random_trie", 640, 128, None), ("forest", 1, 200, None), ("forest", 127, 0, 40)),
        *(("forest", 128, 128, None), ("forest", 129, 0, None), ("forest", 1000, 200, 40)),
    ],
)
def test_mask_and_blocks_are_those_of_the_dense_mask(shape: str, size: int, past: int, window: int | None) -> None:
    layout = layout_of(SHAPES[shape](size), past)
    mask = tree_block_mask(layout, window)
    queries, keys = mask.seq_lengths
    assert queries % BLOCK == 0 and keys % BLOCK == 0 and queries >= size and keys >= past + size
    dense = create_mask(mask.mask_mod, None, None, queries, keys, device="cpu")[0, 0]
    assert torch.equal(dense[:size, : past + size], visible_mask(layout, window=window))
    assert not dense[:, past + size :].any()
    assert dense.any(dim=1).all(), "a padding query that sees nothing would give NaN"
    wanted = create_block_mask(mask.mask_mod, None, None, queries, keys, device="cpu", BLOCK_SIZE=BLOCK)
    needed = wanted.to_dense()[0, 0].bool()
    visited = mask.to_dense()[0, 0].bool()
    assert (visited | ~needed).all(), "a block with visible keys is skipped"
    if window is None:
        assert torch.equal(visited, needed)
    tiles = dense.view(queries // BLOCK, BLOCK, keys // BLOCK, BLOCK).permute(0, 2, 1, 3)
    full = torch.zeros_like(visited)
    for block, count in enumerate(mask.full_kv_num_blocks[0, 0].tolist()):
        full[block, mask.full_kv_indices[0, 0, block, :count].long()] = True
    assert (~full | tiles.all(dim=-1).all(dim=-1)).all(), "a block that is masked in part is taken for full"
