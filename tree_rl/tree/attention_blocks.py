"""Counts the blocks of keys that a forest's attention visits; the share of partial blocks decides the fastest kernel.

Legend: N unique tokens, P past tokens, T query blocks, B key blocks.
"""

from dataclasses import dataclass

import numpy as np

BLOCK = 128
"""Tokens of a block of queries and of a block of keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBlocks:
    """Pairs of a query block and a key block with at least one visible pair of tokens."""

    full: int
    """Block pairs in which every token pair is visible: a kernel needs no mask."""
    partial: int
    """Block pairs in which some token pairs are visible: a kernel computes all and masks the rest."""

    @property
    def partial_share(self) -> float:
        """Share of visited blocks that are partial; 0 if none is visited."""
        return self.partial / max(self.full + self.partial, 1)

    def __add__(self, other: "AttentionBlocks") -> "AttentionBlocks":
        return AttentionBlocks(full=self.full + other.full, partial=self.partial + other.partial)


def count_attention_blocks(subtree_end: np.ndarray, *, past_length: int = 0) -> AttentionBlocks:
    """Exact count for causal attention without a sliding window, in O(N + T B).

    Args:
        subtree_end: int [N], first index past the subtree of each token.
        past_length: P, ancestors in front of the forest, visible to every token.
    """
    num_tokens = len(subtree_end)
    if num_tokens == 0:
        return AttentionBlocks(full=0, partial=0)
    num_keys = past_length + num_tokens
    key_end = np.full(num_keys, num_keys, dtype=np.int64)
    key_end[past_length:] += subtree_end.astype(np.int64) - num_tokens
    first_key_B = np.arange(0, num_keys, BLOCK)
    smallest_end_B = np.minimum.reduceat(key_end, first_key_B)
    largest_end_B = np.maximum.reduceat(key_end, first_key_B)
    first_query_T1 = past_length + np.arange(0, num_tokens, BLOCK)[:, None]
    last_query_T1 = first_query_T1 + BLOCK - 1
    # Subtrees are nested and every token sees itself, so the keys that a query block sees have no gap: a key block is
    # visible to a query block iff its largest subtree end lies past the first query.
    visited_TB = (first_key_B <= last_query_T1) & (largest_end_B > first_query_T1)
    last_key_B = first_key_B + BLOCK - 1
    # A query block that reaches past the last token is never full: no subtree ends after its last query.
    full_TB = (last_key_B <= first_query_T1) & (smallest_end_B > last_query_T1)
    full = int(full_TB.sum())
    return AttentionBlocks(full=full, partial=int(visited_TB.sum()) - full)
