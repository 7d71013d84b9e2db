"""What flash-attn-4's kernels read of a forest: block lists for both directions and the vectors of the mask.

Plain torch, built once per layout, head size, number of heads and window. Legend: N unique tokens, P past tokens,
M = P + N keys, H query heads; T rows and C columns of a block list.
"""

from dataclasses import dataclass, fields

import torch
from torch.nn.functional import pad

from tree_kernels.tree_attention.block_lists import BlockLists, block_lists, key_depths, key_ends
from tree_kernels.tree_attention.fa4.leaf_rows import LeafRows, leaf_rows
from tree_kernels.tree_layout import TreeLayout, kept

SHORTEST = 193
"""Tokens below which inputs are padded: FA4 compiles other kernels for a single block of queries or keys."""
FORWARD_BLOCKS = {64: (192, 128), 128: (128, 128), 256: (128, 64)}
"""Tokens per query block and per key block, by head size: FA4's own tiles."""
BACKWARD_BLOCKS = {64: (128, 128), 128: (64, 128), 256: (64, 64)}
"""Tokens per query block and per key block of the backward. Lists of 128 queries would serve from head size 128 on, 0
to 2 % slower (docs/log.md)."""
MOST_KEYS = 1.3
"""Keys of all paths over unique tokens up to which rows over copied keys are taken instead of a plan.

docs/benchmarks/leaf_rows.csv: forward and backward take 3 to 8 % less up to 1.28, 1 to 3 % less at 1.44 and 1.47 with
4,000 tokens a row or more, 4 % more at 1.94, and 6 % more at 1.44 with 1,024."""
FEWEST_QUERIES = 512
"""Unique tokens a row from which they are: 8 % less time at 1.11 with 512, 7 % more with 256, whose last query blocks
weigh more."""
VECTOR_PADDING = 384
"""A multiple of every block: a mask is evaluated for whole tiles."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadBlockLists(BlockLists):
    """Block lists as FA4 takes them: [1, H, ...], one list for all heads with stride 0 over H, in every case."""

    block_size: tuple[int, int]
    """tokens per query block and per key block"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fa4Plan:
    """Everything but q, k, v and the scale of one attention call."""

    padding: int
    """tokens to append to q, k and v; each is a tree of its own"""
    forward: HeadBlockLists
    """key blocks of each query block"""
    backward: HeadBlockLists
    """query blocks of each key block"""
    ends: torch.Tensor
    """int32 [M rounded up], `key_ends`"""
    key_depths: torch.Tensor | None
    """int32 [M rounded up], with a window"""
    query_depths: torch.Tensor | None
    """int32 [N rounded up], with a window"""
    window: int | None
    """a query at depth d sees keys of depth > d - window only"""


def rows_worth_copying(layout: TreeLayout, window: int | None) -> LeafRows | None:
    """The rows of a layout that FA4's own causal kernels for rows serve better than a mask and block lists.

    Where nothing is shared the mask alone costs 4 to 6 % (docs/benchmarks/attention.csv, commit f333bca); where little
    is, copies of the shared keys cost less than that. Below `SHORTEST` the padded plan stays: its kernels are the same
    for every length.

    Returns:
        None where much is shared, a past or a window is seen, or where the host does not know.
    """
    if window is not None or layout.past_length > 0 or layout.num_tokens < SHORTEST:
        return None
    return kept(leaf_rows)(layout, most_keys=MOST_KEYS, fewest_queries=FEWEST_QUERIES)


@kept
def fa4_plan(layout: TreeLayout, *, head_size: int, heads: int, window: int | None) -> Fa4Plan:
    """The plan of a layout, built at the first call and kept with it.

    Args:
        layout: the forest and the length of its past; at least one token.
        head_size: D, a key of FORWARD_BLOCKS.
        heads: number H of query heads.
        window: attention window in tokens of depth, or None.
    """
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
        ends=key_ends(padded),
        key_depths=None if window is None else key_depths(padded),
        query_depths=None if window is None else pad(padded.depth, (0, depth_padding)).contiguous(),
        window=window,
    )


def for_heads(lists: BlockLists, heads: int, block_size: tuple[int, int]) -> HeadBlockLists:
    """The same lists with a batch of one and `heads` heads, without copying.

    The stride over heads is 0 even for one head: FA4 compiles by which strides are 0.
    """

    def spread(t: torch.Tensor) -> torch.Tensor:
        """One list for all heads, with stride 0."""
        return t.as_strided((1, heads, *t.shape), (t.numel(), 0, *t.stride()))

    of_heads = {field.name: spread(getattr(lists, field.name)) for field in fields(lists)}
    return HeadBlockLists(block_size=block_size, **of_heads)


def _with_lone_tokens(layout: TreeLayout, count: int) -> TreeLayout:
    """The layout with `count` trees of one token behind it, which see the past and themselves."""
    num_tokens = layout.num_tokens
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=layout.device) + num_tokens
    return TreeLayout(
        torch.cat([layout.subtree_end, ends]),
        torch.cat([layout.position, torch.zeros_like(ends)]),
        layout.past_length,
    )
