"""Which blocks of keys a block of queries sees fully, partly or not at all; all block-sparse kernels use these lists.

Built with torch operations on the layout's device without synchronisation: shapes depend only on lengths. Keys of the
past come first and are visible to all queries; query i is key P + i.
Legend: N unique tokens, P past tokens, M = P + N keys, T query blocks, B key blocks, R rows and C columns of a list.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tree_kernels.tree_layout import TreeLayout, kept

FOREVER = torch.iinfo(torch.int32).max
KEY_PADDING = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockLists:
    """Fully and partly visible blocks: key blocks of each query block (by query), or the reverse (by key).

    The first `count` columns list blocks in ascending order; the remaining columns hold other valid block numbers. A
    fully visible block needs no mask: all its pairs are visible, and neither block is cut off by the end.
    """

    full_count: torch.Tensor
    """int32 [R], number of fully visible blocks; R = T by query and B by key."""
    full_index: torch.Tensor
    """int32 [R, C], fully visible blocks first; C = B by query and T by key."""
    partial_count: torch.Tensor
    """int32 [R], number of partly visible blocks."""
    partial_index: torch.Tensor
    """int32 [R, C], partly visible blocks first."""


@kept
def block_lists(
    layout: TreeLayout,
    *,
    query_block: int,
    key_block: int,
    by: Literal["query", "key"],
    window: int | None = None,
) -> BlockLists:
    """The block lists of a layout; cached with it.

    Without a window the classification is exact. With a window it is conservative: a block counts as partial unless
    its depths prove that it is fully visible or invisible.

    Args:
        layout: the forest and the length of its past.
        query_block: tokens per query block; blocks start at token 0 of the forest.
        key_block: keys per key block; blocks start at the first key of the past.
        by: "query" lists the key blocks of each query block, "key" the query blocks of each key block.
        window: as in `tree_attention`.
    """
    # Lists by query and by key of the same block sizes share the matrices.
    relations = kept(block_relations)(layout, query_block, key_block, window)
    return listed(*(blocks_TB.T if by == "key" else blocks_TB for blocks_TB in relations))


@kept
def key_ends(layout: TreeLayout) -> torch.Tensor:
    """int32 [M rounded up to KEY_PADDING]: key j is visible to the queries at keys j .. end[j] - 1.

    The past has end FOREVER, padding has end 0.
    """
    return _padded_keys(layout, FOREVER, layout.subtree_end + layout.past_length, 0, KEY_PADDING)


@kept
def key_depths(layout: TreeLayout) -> torch.Tensor:
    """int32 [M rounded up to KEY_PADDING]: depth of each key on its whole path, 0 in the padding."""
    return _padded_depths(layout, 0, KEY_PADDING)


def listed(full_RC: torch.Tensor, partial_RC: torch.Tensor) -> BlockLists:
    """Block lists from bool matrices [R, C] of fully and of partly visible blocks."""
    full_count, full_index = _packed(full_RC)
    partial_count, partial_index = _packed(partial_RC)
    return BlockLists(
        full_count=full_count, full_index=full_index, partial_count=partial_count, partial_index=partial_index
    )


def _packed(blocks_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of true columns, int32 [R], and all columns, int32 [R, C], the true ones first, each part ascending.

    Every column has a distinct place, so one scatter writes the list without sorting.
    """
    rank = blocks_RC.cumsum(1, dtype=torch.int32)
    count = blocks_RC.sum(1, dtype=torch.int32)
    column = torch.arange(blocks_RC.shape[1], dtype=torch.int32, device=blocks_RC.device)
    place = torch.where(blocks_RC, rank - 1, count[:, None] + column - rank)
    index = torch.empty(blocks_RC.shape, dtype=torch.int32, device=blocks_RC.device)
    return count, index.scatter_(1, place.long(), column.expand(blocks_RC.shape))


def block_relations(
    layout: TreeLayout, query_block: int, key_block: int, window: int | None, *, whole_queries: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [T, B]: fully visible blocks and partly visible blocks, not cached. Arguments as in `block_lists`.

    With `whole_queries`, a query block that reaches past the last token sees no block fully.

    A key block has a visible pair iff its first key is not after the last query and its largest end is after the first
    query; this suffices because subtrees are nested and every token sees itself. It is full iff its last key is not
    after the first query and its smallest end is after the last query.
    """
    device, past, num_tokens = layout.device, layout.past_length, layout.num_tokens
    smallest_end_B, largest_end_B = _block_ends(layout, key_block)
    query_blocks, key_blocks = -(-num_tokens // query_block), smallest_end_B.shape[0]
    first_query_T1 = past + query_block * torch.arange(query_blocks, dtype=torch.int32, device=device)[:, None]
    first_key_B = key_block * torch.arange(key_blocks, dtype=torch.int32, device=device)
    last_query_T1 = first_query_T1 + query_block - 1
    last_key_B = first_key_B + key_block - 1
    visible_TB = (first_key_B <= last_query_T1) & (largest_end_B > first_query_T1)
    full_TB = (last_key_B <= first_query_T1) & (smallest_end_B > last_query_T1)
    if whole_queries:
        # Ends do not show this for keys of the past, which have end FOREVER.
        full_TB &= last_query_T1 < past + num_tokens
    if window is not None:
        nearest_TB, farthest_TB = _depth_distances(layout, query_block, key_block)
        visible_TB &= nearest_TB < window
        full_TB &= farthest_TB < window
    return full_TB, visible_TB & ~full_TB


@kept
def _block_ends(layout: TreeLayout, key_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [B]: smallest and largest end of each key block's keys; cached for several query block sizes."""
    # The padding of the last block has end 0, so that this block is never full.
    return _extremes(_padded_keys(layout, FOREVER, layout.subtree_end + layout.past_length, 0, key_block), key_block)


def _depth_distances(layout: TreeLayout, query_block: int, key_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [T, B]: lower and upper bound of (depth of query - depth of key) over the pairs of two blocks."""
    depth, padding = layout.depth, -layout.num_tokens % query_block
    # Padding repeats the last token, so it does not change the bounds.
    padded = torch.cat([depth, depth[-1:].expand(padding)])
    shallow_T, deep_T = _extremes(padded, query_block)
    _, deep_B = _extremes(_padded_depths(layout, 0, key_block), key_block)
    shallow_B, _ = _extremes(_padded_depths(layout, FOREVER, key_block), key_block)
    return shallow_T[:, None] - deep_B, deep_T[:, None] - shallow_B


def _extremes(padded: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each block."""
    blocks = padded.view(padded.shape[0] // block, block)
    return blocks.amin(1), blocks.amax(1)


def _padded_depths(layout: TreeLayout, padding: int, multiple: int) -> torch.Tensor:
    padded = _padded_keys(layout, 0, layout.depth, padding, multiple)
    padded[: layout.past_length] = torch.arange(layout.past_length, dtype=torch.int32, device=layout.device)
    return padded


def _padded_keys(
    layout: TreeLayout, in_past: int, of_token_N: torch.Tensor, padding: int, multiple: int
) -> torch.Tensor:
    """int32 [M rounded up to `multiple`]: one value for the past, one per token, one for the padding."""
    num_keys = layout.past_length + layout.num_tokens
    padded = torch.full((num_keys + -num_keys % multiple,), in_past, dtype=torch.int32, device=layout.device)
    padded[layout.past_length : num_keys] = of_token_N
    padded[num_keys:] = padding
    return padded
