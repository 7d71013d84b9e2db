"""Block lists and mask vectors of a forest for flash-attn-4's kernels, in plain torch.

Built once per layout, head size, number of heads and window. Legend: N unique tokens, P past tokens, M = P + N keys,
H query heads.
"""

from dataclasses import dataclass, fields

import torch
from torch.nn.functional import pad

from tree_kernels.tree_attention.block_lists import BlockLists, block_lists, key_depths, key_ends
from tree_kernels.tree_attention.fa4.leaf_rows import LeafRows, leaf_rows
from tree_kernels.tree_layout import TreeLayout, kept

SHORTEST = 193
"""Shorter inputs are padded to this many tokens, because FA4 compiles other kernels for a single block."""
FORWARD_BLOCKS = {64: (192, 128), 128: (128, 128), 192: (128, 128), 256: (128, 64)}
"""Tokens per query block and per key block, by head size; FA4's tiles."""
BACKWARD_BLOCKS = {64: (128, 128), 128: (64, 128), 192: (64, 96), 256: (64, 64)}
"""Tokens per query block and per key block of the backward. From head size 128 on, lists of 128 queries would also
work, but are 0 to 2 % slower (docs/log.md)."""
VALUE_SIZES = {64: 64, 128: 128, 192: 128, 256: 256}
"""Head size of values, by that of queries and keys; smaller values are padded."""
MOST_KEYS = 1.3
"""Most keys of all paths, over unique tokens, for which leaf rows with copied keys are used.

docs/benchmarks/leaf_rows.csv: forward and backward take 3 to 8 % less time up to 1.28; at 1.44 and 1.47 1 to 3 % less
with 4,000 tokens a row or more but 6 % more with 1,024; at 1.94 4 % more."""
FEWEST_QUERIES = 512
"""Fewest unique tokens per row for which leaf rows with copied keys are used: at a key ratio of 1.11, 512 take 8 % less
time and 256 take 7 % more, because partly filled query blocks weigh more."""
VECTOR_PADDING = 384
"""A multiple of all block sizes, because a mask is evaluated for whole tiles."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadBlockLists(BlockLists):
    """Block lists in FA4's format: [1, H, ...], one list for all heads with stride 0 over H."""

    block_size: tuple[int, int]
    """Tokens per query block and per key block."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fa4Plan:
    """All inputs of an attention call except q, k, v and the scale."""

    padding: int
    """Number of one-token trees to append to q, k and v."""
    forward: HeadBlockLists
    """Key blocks of each query block."""
    backward: HeadBlockLists
    """Query blocks of each key block."""
    ends: torch.Tensor
    """int32 [M rounded up], `key_ends`."""
    key_depths: torch.Tensor | None
    """int32 [M rounded up]; None without a window."""
    query_depths: torch.Tensor | None
    """int32 [N rounded up]; None without a window."""
    window: int | None
    """Attention window, as in `tree_attention`."""


def rows_worth_copying(layout: TreeLayout, window: int | None) -> LeafRows | None:
    """The leaf rows of a layout if FA4's causal kernels over them are faster than a mask and block lists.

    If nothing is shared, the mask alone costs 4 to 6 % (docs/benchmarks/attention.csv, commit f333bca); if little is
    shared, copying the shared keys costs less than that. Below `SHORTEST` the padded plan is used, whose kernels are
    the same for every length.

    Returns:
        None if much is shared, with a past or a window, or if the host does not have the layout.
    """
    if window is not None or layout.past_length > 0 or layout.num_tokens < SHORTEST:
        return None
    return kept(leaf_rows)(layout, most_keys=MOST_KEYS, fewest_queries=FEWEST_QUERIES)


@kept
def fa4_plan(layout: TreeLayout, *, head_size: int, heads: int, window: int | None) -> Fa4Plan:
    """The plan of a layout of at least one token, for a head size of FORWARD_BLOCKS; cached with the layout."""
    padding = max(0, SHORTEST - layout.num_tokens)
    padded = layout if padding == 0 else _with_lone_tokens(layout, padding)
    forward_block, backward_block = FORWARD_BLOCKS[head_size], BACKWARD_BLOCKS[head_size]
    by_query = block_lists(padded, query_block=forward_block[0], key_block=forward_block[1], by="query", window=window)
    by_key = block_lists(padded, query_block=backward_block[0], key_block=backward_block[1], by="key", window=window)
    depth_padding = -padded.num_tokens % VECTOR_PADDING
    return Fa4Plan(
        padding=padding,
        forward=for_heads(by_query, heads, forward_block),
        backward=for_heads(by_key, heads, backward_block),
        ends=_whole_blocks(key_ends(padded), backward_block[1]),
        key_depths=None if window is None else _whole_blocks(key_depths(padded), backward_block[1]),
        query_depths=None if window is None else pad(padded.depth, (0, depth_padding)).contiguous(),
        window=window,
    )


def _whole_blocks(keys: torch.Tensor, block: int) -> torch.Tensor:
    """A vector over keys, padded with zeros to whole blocks; `KEY_PADDING` is a multiple of all sizes but 96."""
    return keys if len(keys) % block == 0 else pad(keys, (0, -len(keys) % block))


def for_heads(lists: BlockLists, heads: int, block_size: tuple[int, int]) -> HeadBlockLists:
    """The same lists with a batch of one and `heads` heads, without copying.

    The stride over heads is 0 even for one head, because FA4 compiles another kernel for other strides.
    """

    def spread(t: torch.Tensor) -> torch.Tensor:
        return t.as_strided((1, heads, *t.shape), (t.numel(), 0, *t.stride()))

    of_heads = {field.name: spread(getattr(lists, field.name)) for field in fields(lists)}
    return HeadBlockLists(block_size=block_size, **of_heads)


def _with_lone_tokens(layout: TreeLayout, count: int) -> TreeLayout:
    """The layout with `count` trees of one token appended; each sees the past and itself."""
    num_tokens = layout.num_tokens
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=layout.device) + num_tokens
    return TreeLayout(
        torch.cat([layout.subtree_end, ends]),
        torch.cat([layout.position, torch.zeros_like(ends)]),
        layout.past_length,
    )
