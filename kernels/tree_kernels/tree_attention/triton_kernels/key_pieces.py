"""Long lists of query blocks cut into pieces, so that a root seen by a whole forest does not keep one program busy
after all others are done. Cut on the layout's device without waiting for it: only bounds on the numbers are known.

Legend: B key blocks, X pieces (an upper bound), one program each.
"""

from dataclasses import dataclass

import torch

from tree_kernels.tree_attention.block_lists import BlockLists
from tree_kernels.tree_layout import TreeLayout

PIECES_PER_PROGRAM = 4
"""A piece is at most this fraction of an even share: what the last program to finish can be late by."""
SHORTEST_PIECE = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyPieces:
    """Which part of which key block's query blocks (full ones first, then partial ones) each program works off."""

    block: torch.Tensor
    """int32 [X], key block of each piece; B: no piece"""
    first_item: torch.Tensor
    """int32 [X]"""
    stop_item: torch.Tensor
    """int32 [X]"""
    slot: torch.Tensor
    """int32 [X], where a piece of a cut block leaves its sum; -1: the block is whole and its gradient final"""
    first_slot: torch.Tensor
    """int32 [B]"""
    slot_count: torch.Tensor
    """int32 [B], pieces of a cut block in consecutive slots; 0: not cut"""
    num_slots: int
    """upper bound on the slots of one key head"""


def key_pieces(layout: TreeLayout, lists: BlockLists, *, key_heads: int, programs: int) -> KeyPieces:
    """The pieces of a layout's lists, cut at the first call and kept with it.

    Args:
        layout: the forest, which keeps the pieces.
        lists: its lists by key.
        key_heads: number of key heads, each of which goes through all pieces.
        programs: programs that the device runs at a time.
    """
    most_cuts = -(-programs * PIECES_PER_PROGRAM // key_heads)
    key = ("key_pieces", lists, most_cuts)
    return layout.metadata(key, lambda own: cut(lists.full_count + lists.partial_count, most_cuts))


def cut(items_B: torch.Tensor, most_cuts: int) -> KeyPieces:
    """Pieces of at most 1 / `most_cuts` of all items, which are as many as blocks and cuts at most."""
    device, blocks = items_B.device, items_B.shape[0]
    longest = (items_B.sum() + most_cuts - 1).div(most_cuts, rounding_mode="floor").clamp(min=SHORTEST_PIECE)
    pieces_B = ((items_B + longest - 1).div(longest, rounding_mode="floor")).clamp(min=1)
    piece_items_B = (items_B + pieces_B - 1).div(pieces_B, rounding_mode="floor")
    stop_piece_B = pieces_B.cumsum(0)
    piece_X = torch.arange(blocks + most_cuts, device=device)
    block_X = torch.searchsorted(stop_piece_B, piece_X, right=True)
    real_X = block_X.clamp(max=blocks - 1)
    rank_X = piece_X - (stop_piece_B - pieces_B)[real_X]
    first_item_X = rank_X * piece_items_B[real_X]
    slot_count_B = torch.where(pieces_B > 1, pieces_B, 0)
    first_slot_B = slot_count_B.cumsum(0) - slot_count_B
    slot_X = torch.where(slot_count_B[real_X] > 0, first_slot_B[real_X] + rank_X, -1)
    return KeyPieces(
        block=block_X.int(),
        first_item=first_item_X.int(),
        stop_item=torch.minimum(first_item_X + piece_items_B[real_X], items_B[real_X]).int(),
        slot=slot_X.int(),
        first_slot=first_slot_B.int(),
        slot_count=slot_count_B.int(),
        # A block of p > 1 pieces has p - 1 cuts, so there are at most two slots to a cut.
        num_slots=2 * most_cuts,
    )
