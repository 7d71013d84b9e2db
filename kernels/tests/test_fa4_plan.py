"""What flash-attn-4 is given covers exactly the mask: blocks, vectors and padding, for both directions."""

import pytest
import torch
from attention_problems import seen_by_vectors
from tree_shapes import SHAPES, layout_of

from tree_kernels.tree_attention.block_lists import block_lists
from tree_kernels.tree_attention.fa4.fa4_plan import (
    BACKWARD_BLOCKS,
    FORWARD_BLOCKS,
    SHORTEST,
    Fa4Plan,
    HeadBlockLists,
    fa4_plan,
    for_heads,
)
from tree_kernels.tree_attention.reference import visible_mask

HEADS = 6


def visited_pairs(plan: Fa4Plan, lists: HeadBlockLists, by_key: bool, tokens: int, past: int) -> torch.Tensor:
    """bool [tokens, past + tokens] of the pairs that FA4 adds up: full blocks unmasked, partial ones through the mask.

    The last head is read; a whole tile is masked, also where it reaches past the last token or key.
    """
    query_block, key_block = lists.block_size
    rows, columns = -(-tokens // query_block) * query_block, -(-(past + tokens) // key_block) * key_block
    pairs = torch.zeros(rows, columns, dtype=torch.int64)
    counts = ((lists.full_count, lists.full_index, True), (lists.partial_count, lists.partial_index, False))
    for count, index, is_full in counts:
        for row in range(count.shape[2]):
            for column in index[0, HEADS - 1, row, : int(count[0, HEADS - 1, row])].tolist():
                query, key = (column, row) if by_key else (row, column)
                queries = torch.arange(query * query_block, (query + 1) * query_block)
                keys = torch.arange(key * key_block, (key + 1) * key_block)
                tile = torch.ones(query_block, key_block, dtype=torch.bool)
                if not is_full:
                    tile = seen_by_vectors(plan, queries, keys, past)
                pairs[queries[0] : queries[-1] + 1, keys[0] : keys[-1] + 1] += tile
    # Queries and keys behind the last are cut off by the kernels themselves.
    pairs = pairs[:tokens, : past + tokens]
    assert pairs.max() == 1, "a pair is added twice"
    return pairs.bool()


@pytest.mark.parametrize("head_size", FORWARD_BLOCKS)
@pytest.mark.parametrize(
    ("size", "past", "window", "shape"),
    [
        *((1, 0, None, "forest"), (3, 1, 40, "forest"), (65, 77, None, "trunk_and_stubs")),
        *((200, 1, 40, "trunk_and_stubs"), (700, 333, None, "forest"), (700, 0, 40, "forest")),
    ],
)
def test_visited_pairs_are_the_visible_ones(
    size: int, past: int, window: int | None, shape: str, head_size: int
) -> None:
    layout = layout_of(SHAPES[shape](size), past)
    plan = fa4_plan(layout, head_size=head_size, heads=HEADS, window=window)
    tokens = size + plan.padding
    assert tokens >= SHORTEST and (plan.padding == 0) == (size >= SHORTEST)
    expected = visible_mask(layout, window=window)
    for lists, by_key in ((plan.forward, False), (plan.backward, True)):
        pairs = visited_pairs(plan, lists, by_key, tokens, past)
        assert torch.equal(pairs[:size, : past + size], expected)
        assert not pairs[:size, past + size :].any(), "a token sees padding"
        assert pairs.any(1).all(), "a row without keys has no softmax"
    assert plan.forward.block_size == FORWARD_BLOCKS[head_size]
    assert plan.backward.block_size == BACKWARD_BLOCKS[head_size]


def test_lists_are_shared_by_all_heads_without_a_copy() -> None:
    heads = 5
    layout = layout_of(SHAPES["forest"](400))
    lists = block_lists(layout, query_block=64, key_block=128, by="key")
    spread = for_heads(lists, heads, (64, 128))
    for name in ("full_count", "full_index", "partial_count", "partial_index"):
        wide, narrow = getattr(spread, name), getattr(lists, name)
        assert wide.dtype == torch.int32 and wide.shape == (1, heads, *narrow.shape)
        assert wide.data_ptr() == narrow.data_ptr() and wide.stride(1) == 0 and wide.stride(0) != 0
        assert all(torch.equal(wide[0, head], narrow) for head in range(heads))
