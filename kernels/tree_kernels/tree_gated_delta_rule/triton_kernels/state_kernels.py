"""Kernels of the states: one program walks a chain of tiles with the state in registers, forward and backward.

Legend: T tiles, C rows of a tile, H value heads, K and V state sizes, S slots of stored float32 states.
"""

import triton
import triton.language as tl

from tree_kernels.tree_gated_delta_rule.triton_kernels.tile import (
    exit_decays,
    load_columns,
    load_matrix,
    load_matrix_columns,
    load_rows,
    row_offsets,
    store_matrix,
    token_offsets,
)


@triton.jit(do_not_specialize=["first_chain", "num_tokens"])
def walk_kernel(
    k_pointer: tl.tensor,
    reads_pointer: tl.tensor,
    own_pointer: tl.tensor,
    written_pointer: tl.tensor,
    entry_pointer: tl.tensor,
    slot_pointer: tl.tensor,
    to_exit_pointer: tl.tensor,
    kept_pointer: tl.tensor,
    token_pointer: tl.tensor,
    stored_slot_pointer: tl.tensor,
    chain_start_pointer: tl.tensor,
    chain_slot_pointer: tl.tensor,
    first_chain: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    CORRECTS: tl.constexpr,
) -> None:
    """Walk down the chains of one level. Grid: (V / BV, chains * H).

    Writes U to `written` [T, H, C, V], which may be `own`, the tile's own part of U; entry states to `entry` [T, H, K,
    V]; and, where `stored_slot` is not negative, entry states in float32 to slots. Without CORRECTS, as in Mamba 2, U
    does not depend on states and is only read.
    """
    first = tl.program_id(0) * BV
    chain, head = first_chain + tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row = tl.arange(0, C)
    state_rows = row_offsets(tl.load(chain_slot_pointer + chain), head, HEADS, K, V)
    state = load_matrix(slot_pointer, state_rows, first, BV)
    start, stop = tl.load(chain_start_pointer + chain), tl.load(chain_start_pointer + chain + 1)
    of_tile = start.to(tl.int64) * HEADS + head
    weight, kept_part = tl.load(to_exit_pointer + of_tile * C + row), tl.load(kept_pointer + of_tile)
    slot = tl.load(stored_slot_pointer + start)
    for step in range(stop - start):
        tile = start + step
        # Load the next tile's factors while this tile computes.
        following = tl.minimum(tile + 1, stop - 1)
        of_tile = following.to(tl.int64) * HEADS + head
        next_weight, next_kept = tl.load(to_exit_pointer + of_tile * C + row), tl.load(kept_pointer + of_tile)
        next_slot = tl.load(stored_slot_pointer + following)
        token = tl.load(token_pointer + tile * C + row)
        k_offset = token_offsets(token, head // GROUP, HEADS // GROUP, K)
        k_KC = load_columns(k_pointer, k_offset, token < num_tokens, 0, K)
        low_state = state.to(k_pointer.dtype.element_ty)
        store_matrix(entry_pointer, low_state, row_offsets(tile, head, HEADS, K, V), first, BV)
        if slot >= 0:
            store_matrix(slot_pointer, state, row_offsets(slot, head, HEADS, K, V), first, BV)

        written_rows = row_offsets(tile, head, HEADS, C, V)
        if CORRECTS:
            reads = load_matrix(reads_pointer, row_offsets(tile, head, HEADS, C, K), 0, K)
            own = load_matrix(own_pointer, written_rows, first, BV)
            written = own.to(tl.float32) - tl.dot(reads, low_state, input_precision="ieee")
            store_matrix(written_pointer, written, written_rows, first, BV)
        else:
            written = load_matrix(written_pointer, written_rows, first, BV).to(tl.float32)
        added = (written * weight[:, None]).to(k_KC.dtype)
        state = tl.dot(k_KC, added, state * kept_part, input_precision="ieee")
        weight, kept_part, slot = next_weight, next_kept, next_slot


@triton.jit(do_not_specialize=["first_side", "num_tokens", "num_tiles"])
def side_states_kernel(
    k_pointer: tl.tensor,
    written_pointer: tl.tensor,
    slot_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    side_tile_pointer: tl.tensor,
    side_row_pointer: tl.tensor,
    side_slot_pointer: tl.tensor,
    entry_slot_pointer: tl.tensor,
    first_side: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """States at side exits. Grid: (V / BV, side exits of the level * H)."""
    first = tl.program_id(0) * BV
    side, head = first_side + tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    tile = tl.load(side_tile_pointer + side)
    token = tl.load(token_pointer + tile * C + tl.arange(0, C))
    exit_row = tl.load(side_row_pointer + side)
    weight, kept_part = exit_decays(path_pointer, row_end_pointer, exit_row, tile, head, num_tiles, HEADS, C)
    entry_rows = row_offsets(tl.load(entry_slot_pointer + tile), head, HEADS, K, V)
    state = load_matrix(slot_pointer, entry_rows, first, BV) * kept_part
    written = load_matrix(written_pointer, row_offsets(tile, head, HEADS, C, V), first, BV)
    k_offset = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    k_KC = load_columns(k_pointer, k_offset, token < num_tokens, 0, K)
    added = (written.to(tl.float32) * weight[:, None]).to(k_KC.dtype)
    state = tl.dot(k_KC, added, state, input_precision="ieee")
    slot_rows = row_offsets(tl.load(side_slot_pointer + side), head, HEADS, K, V)
    store_matrix(slot_pointer, state, slot_rows, first, BV)


@triton.jit(do_not_specialize=["first_joint", "num_tokens", "num_tiles"])
def joint_gradients_kernel(
    k_pointer: tl.tensor,
    d_written_pointer: tl.tensor,
    d_side_pointer: tl.tensor,
    d_source_pointer: tl.tensor,
    d_joint_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    joint_tile_pointer: tl.tensor,
    joint_slot_pointer: tl.tensor,
    side_start_pointer: tl.tensor,
    side_row_pointer: tl.tensor,
    side_slot_pointer: tl.tensor,
    source_start_pointer: tl.tensor,
    source_pointer: tl.tensor,
    first_joint: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Gradients that flow into a tile from other chains, before its own chain is walked up. Grid: (V / BV, joints * H).

    A joint is a tile from which other chains start, at its entry state (`joint_slot`) or at side exits. Gradients are
    summed in the fixed order of `source`.
    """
    first = tl.program_id(0) * BV
    joint, head = first_joint + tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    tile = tl.load(joint_tile_pointer + joint)
    slot = tl.load(joint_slot_pointer + joint)
    token = tl.load(token_pointer + tile * C + tl.arange(0, C))
    k_offset = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    written_rows = row_offsets(tile, head, HEADS, C, V)
    d_written = load_matrix(d_written_pointer, written_rows, first, BV).to(tl.float32)
    d_entry = tl.zeros([K, BV], tl.float32)
    if slot >= 0:
        for place in range(tl.load(source_start_pointer + slot), tl.load(source_start_pointer + slot + 1)):
            rows = row_offsets(tl.load(source_pointer + place), head, HEADS, K, V)
            d_entry += load_matrix(d_source_pointer, rows, first, BV)
    first_side = tl.load(side_start_pointer + tile)
    for number in range(tl.load(side_start_pointer + tile + 1) - first_side):
        side = first_side + number
        side_slot = tl.load(side_slot_pointer + side)
        d_state = tl.zeros([K, BV], tl.float32)
        for place in range(tl.load(source_start_pointer + side_slot), tl.load(source_start_pointer + side_slot + 1)):
            rows = row_offsets(tl.load(source_pointer + place), head, HEADS, K, V)
            d_state += load_matrix(d_source_pointer, rows, first, BV)
        exit_row = tl.load(side_row_pointer + side)
        weight, kept_part = exit_decays(path_pointer, row_end_pointer, exit_row, tile, head, num_tiles, HEADS, C)
        low_d_state = d_state.to(k_pointer.dtype.element_ty)
        store_matrix(d_side_pointer, low_d_state, row_offsets(side, head, HEADS, K, V), first, BV)
        k_CK = load_rows(k_pointer, k_offset, token < num_tokens, 0, K)
        d_written += weight[:, None] * tl.dot(k_CK, low_d_state, input_precision="ieee")
        d_entry += kept_part * d_state
    store_matrix(d_written_pointer, d_written, written_rows, first, BV)
    store_matrix(d_joint_pointer, d_entry, row_offsets(joint, head, HEADS, K, V), first, BV)


@triton.jit(do_not_specialize=["first_chain", "num_tokens"])
def walk_back_kernel(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    reads_pointer: tl.tensor,
    d_out_pointer: tl.tensor,
    d_written_pointer: tl.tensor,
    d_main_pointer: tl.tensor,
    d_source_pointer: tl.tensor,
    d_joint_pointer: tl.tensor,
    from_entry_pointer: tl.tensor,
    to_exit_pointer: tl.tensor,
    kept_pointer: tl.tensor,
    token_pointer: tl.tensor,
    joint_pointer: tl.tensor,
    chain_start_pointer: tl.tensor,
    first_chain: tl.tensor,
    num_tokens: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    CORRECTS: tl.constexpr,
) -> None:
    """Walk up the chains of one level with the gradient of the state. Grid: (V / BV, chains * H).

    `d_written` [T, H, C, V] contains the parts from outputs and side exits and is completed. Writes the gradient of
    the state that leaves each tile along the chain to `d_main` [T, H, K, V], that of the start state to `d_source`.
    """
    first = tl.program_id(0) * BV
    chain, head = first_chain + tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    row = tl.arange(0, C)
    d_state = tl.zeros([K, BV], tl.float32)
    start, stop = tl.load(chain_start_pointer + chain), tl.load(chain_start_pointer + chain + 1)
    of_tile = (stop - 1).to(tl.int64) * HEADS + head
    weight, kept_part = tl.load(to_exit_pointer + of_tile * C + row), tl.load(kept_pointer + of_tile)
    factor = tl.load(from_entry_pointer + of_tile * C + row)
    joint = tl.load(joint_pointer + stop - 1)
    for step in range(stop - start):
        tile = stop - 1 - step
        # Load the next tile's factors while this tile computes.
        following = tl.maximum(tile - 1, start)
        of_tile = following.to(tl.int64) * HEADS + head
        next_weight, next_kept = tl.load(to_exit_pointer + of_tile * C + row), tl.load(kept_pointer + of_tile)
        next_factor = tl.load(from_entry_pointer + of_tile * C + row)
        next_joint = tl.load(joint_pointer + following)
        token = tl.load(token_pointer + tile * C + row)
        exists = token < num_tokens
        key_rows = token_offsets(token, head // GROUP, HEADS // GROUP, K)
        k_CK = load_rows(k_pointer, key_rows, exists, 0, K)
        q_KC = load_columns(q_pointer, key_rows, exists, 0, K)
        low_d_state = d_state.to(k_pointer.dtype.element_ty)
        store_matrix(d_main_pointer, low_d_state, row_offsets(tile, head, HEADS, K, V), first, BV)

        written_rows = row_offsets(tile, head, HEADS, C, V)
        d_written = load_matrix(d_written_pointer, written_rows, first, BV).to(tl.float32)
        d_out = load_rows(d_out_pointer, token_offsets(token, head, HEADS, V), exists, first, BV)
        d_out = (d_out.to(tl.float32) * (factor * scale)[:, None]).to(d_out.dtype)
        if CORRECTS:
            reads_KC = load_matrix_columns(reads_pointer, row_offsets(tile, head, HEADS, C, K), 0, K)
        d_written += weight[:, None] * tl.dot(k_CK, low_d_state, input_precision="ieee")
        store_matrix(d_written_pointer, d_written, written_rows, first, BV)
        d_state = tl.dot(q_KC, d_out, d_state * kept_part, input_precision="ieee")
        if CORRECTS:
            d_state -= tl.dot(reads_KC, d_written.to(reads_KC.dtype), input_precision="ieee")
        if joint >= 0:
            d_state += load_matrix(d_joint_pointer, row_offsets(joint, head, HEADS, K, V), first, BV)
        weight, kept_part, factor, joint = next_weight, next_kept, next_factor, next_joint
    store_matrix(d_source_pointer, d_state, row_offsets(chain, head, HEADS, K, V), first, BV)
