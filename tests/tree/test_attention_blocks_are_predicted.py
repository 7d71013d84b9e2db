"""The predicted blocks of attention are those of the dense mask, block by block."""

import numpy as np
import pytest

from tree_rl.tree import Forest
from tree_rl.tree.attention_blocks import BLOCK, AttentionBlocks, count_attention_blocks


def blocks_of_the_dense_mask(subtree_end: np.ndarray, past_length: int) -> AttentionBlocks:
    """The definition: token i sees token j iff j <= i < subtree_end[j], and the whole past."""
    num_tokens = len(subtree_end)
    query, key = np.arange(num_tokens)[:, None], np.arange(num_tokens)
    visible = np.concatenate(
        [np.ones((num_tokens, past_length), dtype=bool), (key <= query) & (query < subtree_end)], axis=1
    )
    padding = [(0, -size % BLOCK) for size in visible.shape]
    padded = np.pad(visible, padding)
    tiles = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    full = int(tiles.all((1, 3)).sum())
    return AttentionBlocks(full=full, partial=int(tiles.any((1, 3)).sum()) - full)


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
def test_blocks_of_random_forests_are_those_of_the_dense_mask(seed: int, past_length: int) -> None:
    end = random_forest(seed, num_rows=1 + 2 * seed).subtree_end
    assert count_attention_blocks(end, past_length=past_length) == blocks_of_the_dense_mask(end, past_length)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_a_chain_is_masked_on_its_diagonal_alone(length: int) -> None:
    counts = count_attention_blocks(np.full(length, length))
    blocks = -(-length // BLOCK)
    assert counts == blocks_of_the_dense_mask(np.full(length, length), 0)
    # The last row of blocks is padded where the length is no multiple.
    assert counts.partial == (blocks if length % BLOCK == 0 else 2 * blocks - 1)


def test_nothing_has_no_blocks() -> None:
    counts = count_attention_blocks(np.empty(0, dtype=np.int32), past_length=300)
    assert counts == AttentionBlocks(full=0, partial=0) and counts.partial_share == 0
