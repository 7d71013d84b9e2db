"""FlexAttention's block mask, built from block maxima, is that of the dense mask."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from tree_shapes import SHAPES, subtree_end_of

from tree_kernels import TreeLayout
from tree_kernels.tree_attention.portable.flex import BLOCK, tree_block_mask
from tree_kernels.tree_attention.reference import visible_mask


@pytest.mark.parametrize(
    ("shape", "size", "past", "window"),
    [
        *(("chain", 640, 200, 40), ("star", 640, 0, None), ("trunk_and_stubs", 640, 0, 40)),
        *(("random_trie", 640, 128, None), ("forest", 1, 200, None), ("forest", 127, 0, 40)),
        *(("forest", 128, 128, None), ("forest", 129, 0, None), ("forest", 1000, 200, 40)),
    ],
)
def test_mask_and_blocks_are_those_of_the_dense_mask(shape: str, size: int, past: int, window: int | None) -> None:
    layout = TreeLayout.from_subtree_end(subtree_end_of(SHAPES[shape](size)), past_length=past)
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
