"""The predicted blocks of attention are those that the kernels visit."""

import numpy as np
import pytest
import torch

from tree_kernels import TreeLayout
from tree_kernels.tree_attention.block_lists import block_lists
from tree_rl.tree import Forest
from tree_rl.tree.attention_blocks import BLOCK, AttentionBlocks, count_attention_blocks


def blocks_of_the_kernels(subtree_end: np.ndarray, past_length: int) -> AttentionBlocks:
    """As the kernels list them, which kernels/tests holds against the dense mask."""
    layout = TreeLayout.from_subtree_end(torch.from_numpy(subtree_end), past_length=past_length)
    lists = block_lists(layout, query_block=BLOCK, key_block=BLOCK, by="query")
    return AttentionBlocks(full=int(lists.full_count.sum()), partial=int(lists.partial_count.sum()))


def random_forest(seed: int, num_rows: int) -> Forest:
    """Rows that leave an earlier row at a random depth; some share nothing."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 50, int(draw.integers(1, 300)))]
    for _ in range(num_rows - 1):
        parent = rows[draw.integers(len(rows))]
        shared = int(draw.integers(0, len(parent) + 1))
        rows.append(np.concatenate([parent[:shared], draw.integers(0, 50, int(draw.integers(1, 300)))]))
    return Forest.from_rows(rows)


@pytest.mark.parametrize("past_length", [0, 1, 128, 200])
@pytest.mark.parametrize("seed", range(8))
def test_blocks_of_random_forests_are_those_of_the_kernels(seed: int, past_length: int) -> None:
    end = random_forest(seed, num_rows=1 + 2 * seed).subtree_end
    assert count_attention_blocks(end, past_length=past_length) == blocks_of_the_kernels(end, past_length)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 1000])
def test_a_chain_is_masked_on_its_diagonal_alone(length: int) -> None:
    counts = count_attention_blocks(np.full(length, length))
    blocks = -(-length // BLOCK)
    assert counts == blocks_of_the_kernels(np.full(length, length), 0)
    # The last row of blocks is padded where the length is no multiple.
    assert counts.partial == (blocks if length % BLOCK == 0 else 2 * blocks - 1)


def test_nothing_has_no_blocks() -> None:
    counts = count_attention_blocks(np.empty(0, dtype=np.int32), past_length=300)
    assert counts == AttentionBlocks(full=0, partial=0) and counts.partial_share == 0
