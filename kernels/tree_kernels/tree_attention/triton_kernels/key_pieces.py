"""Cuts long lists of query blocks into pieces, so that the program of a root that the whole forest sees does not run
long after all others. Computed on the layout's device without synchronisation, so the host knows only upper bounds.

Legend: B key blocks, X pieces (an upper bound), one program each.
"""

from dataclasses import dataclass

import torch

from tree_kernels.tree_attention.block_lists import BlockLists
from tree_kernels.tree_layout import TreeLayout

PIECES_PER_PROGRAM = 4
"""A piece is at most an even share of the work divided by this; it bounds the delay of the last program."""
SHORTEST_PIECE = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyPieces:
    """The part of a key block's list of query blocks (full blocks, then partial blocks) that each program handles."""

    block: torch.Tensor
    """int32 [X], key block of each piece; B if there is no such piece."""
    first_item: torch.Tensor
    """int32 [X], first query block of the piece in the list."""
    stop_item: torch.Tensor
    """int32 [X], end of the piece in the list."""
    slot: torch.Tensor
    """int32 [X], slot for the piece's sum; -1 if the block is not cut."""
    first_slot: torch.Tensor
    """int32 [B], first of the consecutive slots of a cut block."""
    slot_count: torch.Tensor
    """int32 [B], slots of a cut block; 0 if it is not cut."""
    num_slots: int
    """Upper bound on the slots of one key head."""


def key_pieces(layout: TreeLayout, lists: BlockLists, *, key_heads: int, programs: int) -> KeyPieces:
    """The pieces of a layout's lists by key; cached with the layout.

    Each of `key_heads` runs all pieces; the device runs `programs` programs at a time.
    """
    most_cuts = -(-programs * PIECES_PER_PROGRAM // key_heads)
    key = ("key_pieces", lists, most_cuts)
    return layout.metadata(key, lambda own: cut(lists.full_count + lists.partial_count, most_cuts))


def cut(items_B: torch.Tensor, most_cuts: int) -> KeyPieces:
    """Cut lists of given lengths into pieces of at most 1 / `most_cuts` of all items: at most B + most_cuts pieces."""
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
        # A block of p > 1 pieces has p slots and p - 1 cuts, so there are at most two slots per cut.
        num_slots=2 * most_cuts,
    )
