"""The backward kernels of keys and values: one program per piece of a key block's query list, then a sum over pieces.

A key block's gradient stays in registers over all query heads of its key head. Blocks that many queries see are cut
into pieces, whose sums are added in a fixed order without atomics, so results are deterministic.
Scores are computed transposed, as K Q^T, because Triton 3.4 to 3.7.0 miscompiles the transpose of an accumulator as a
product's operand on Hopper. Legend: N queries, M keys, R queries of a tile, C keys of a tile, D padded head size
(that of values in v_CD, grad_v_CD and grad_RD).
"""

import triton
import triton.language as tl

from tree_kernels.tree_attention.triton_kernels.tile import (
    LOG2_E,
    load_block,
    load_rows,
    pairs_visible,
    softmax_weights,
    store_rows,
)


@triton.jit
def _add_key_gradients(
    grad_k_CD: tl.tensor,
    grad_v_CD: tl.tensor,
    k_CD: tl.tensor,
    v_CD: tl.tensor,
    key_C: tl.tensor,
    key_end_C: tl.tensor,
    key_depth_C: tl.tensor,
    q_blocks: tl.tensor,
    grad_blocks: tl.tensor,
    lse_pointer: tl.tensor,
    row_term_pointer: tl.tensor,
    key_depth_pointer: tl.tensor,
    head: tl.tensor,
    first_token: tl.tensor,
    past: tl.tensor,
    num_keys: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,
    window: tl.tensor,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the contribution of one head's query block to the gradients of keys (without the scale) and values.

    Padding queries add nothing, because they, their gradients and their row terms are zeros.
    """
    token_R = first_token + tl.arange(0, ROWS)
    q_RD = load_block(q_blocks, first_token, head)
    grad_RD = load_block(grad_blocks, first_token, head)
    raw_CR = tl.dot(k_CD, tl.trans(q_RD), input_precision=PRECISION)
    lse_log2_R = tl.load(lse_pointer + token_R) * LOG2_E
    weight_CR, slope_CR = softmax_weights(raw_CR, lse_log2_R[None, :], scale_log2, cap_log2, CAPPED)
    if MASKED:
        query_R = token_R + past
        query_depth_R = query_R
        if WINDOWED:
            query_depth_R = tl.load(key_depth_pointer + query_R, mask=query_R < num_keys, other=0)
        visible_CR = pairs_visible(
            query_R[None, :], key_C[:, None], key_end_C[:, None], query_depth_R[None, :], key_depth_C[:, None],
            window, WINDOWED,
        )  # fmt: skip
        weight_CR = tl.where(visible_CR, weight_CR, 0.0)
    if OF_VALUES:
        grad_v_CD = tl.dot(weight_CR.to(grad_RD.dtype), grad_RD, grad_v_CD, input_precision=PRECISION)
    if OF_KEYS:
        grad_weight_CR = tl.dot(v_CD, tl.trans(grad_RD), input_precision=PRECISION)
        grad_raw_CR = weight_CR * (grad_weight_CR - tl.load(row_term_pointer + token_R)[None, :])
        if CAPPED:
            grad_raw_CR = grad_raw_CR * slope_CR
        grad_k_CD = tl.dot(grad_raw_CR.to(q_RD.dtype), q_RD, grad_k_CD, input_precision=PRECISION)
    return grad_k_CD, grad_v_CD


@triton.jit(do_not_specialize=["num_queries", "num_keys", "list_stride", "row_stride", "num_slots", "window"])
def key_gradient_kernel(
    q_blocks: tl.tensor,
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    grad_blocks: tl.tensor,
    lse_pointer: tl.tensor,
    row_term_pointer: tl.tensor,
    grad_k_pointer: tl.tensor,
    grad_v_pointer: tl.tensor,
    piece_sum_pointer: tl.tensor,
    key_end_pointer: tl.tensor,
    key_depth_pointer: tl.tensor,
    full_count_pointer: tl.tensor,
    full_index_pointer: tl.tensor,
    partial_index_pointer: tl.tensor,
    piece_block_pointer: tl.tensor,
    piece_first_pointer: tl.tensor,
    piece_stop_pointer: tl.tensor,
    piece_slot_pointer: tl.tensor,
    k_stride_token: tl.tensor,
    k_stride_head: tl.tensor,
    v_stride_token: tl.tensor,
    v_stride_head: tl.tensor,
    grad_k_stride_token: tl.tensor,
    grad_v_stride_token: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    list_stride: tl.tensor,
    row_stride: tl.tensor,
    num_slots: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    SUM_SIZE: tl.constexpr,
) -> None:
    """Gradients [M, Hkv, D] of keys and [M, Hkv, E] of values, or partial sums [Hkv, slots, 2, C, SUM_SIZE] for blocks
    cut into pieces.

    Grid: (pieces, key heads). Early keys have the most descendants and start first.
    """
    piece, key_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(piece_block_pointer + piece)
    key_C = block * KEYS + tl.arange(0, KEYS)
    if block * KEYS >= num_keys:
        return
    first, stop = tl.load(piece_first_pointer + piece), tl.load(piece_stop_pointer + piece)
    slot = tl.load(piece_slot_pointer + piece)
    exists_C, key_row_C = key_C < num_keys, key_C.to(tl.int64)
    k_offset_C = key_row_C * k_stride_token + key_head * k_stride_head
    v_offset_C = key_row_C * v_stride_token + key_head * v_stride_head
    k_CD = load_rows(k_pointer, k_offset_C, exists_C, HEAD_SIZE, PADDED_SIZE, IN_REGISTERS)
    v_CD = load_rows(v_pointer, v_offset_C, exists_C, VALUE_SIZE, PADDED_VALUE_SIZE, IN_REGISTERS)
    key_end_C = tl.load(key_end_pointer + key_C, mask=exists_C, other=0)
    key_depth_C = key_C
    if WINDOWED:
        key_depth_C = tl.load(key_depth_pointer + key_C, mask=exists_C, other=0)
    past = num_keys - num_queries
    full_count = tl.load(full_count_pointer + block)
    full_list, partial_list = full_index_pointer + block * list_stride, partial_index_pointer + block * list_stride

    grad_k_CD = tl.zeros([KEYS, PADDED_SIZE], tl.float32)
    grad_v_CD = tl.zeros([KEYS, PADDED_VALUE_SIZE], tl.float32)
    for member in range(GROUP):
        head = tl.program_id(1) * GROUP + member
        lse_of_head = lse_pointer + head * tl.multiple_of(row_stride, 128)
        row_term_of_head = row_term_pointer + head * tl.multiple_of(row_stride, 128)
        for item in tl.range(first, tl.minimum(stop, full_count)):
            grad_k_CD, grad_v_CD = _add_key_gradients(
                grad_k_CD, grad_v_CD, k_CD, v_CD, key_C, key_end_C, key_depth_C, q_blocks, grad_blocks, lse_of_head,
                row_term_of_head, key_depth_pointer, head, tl.load(full_list + item) * ROWS, past, num_keys,
                scale_log2, cap_log2, window, ROWS, False, OF_KEYS, OF_VALUES, CAPPED, WINDOWED, PRECISION,
            )  # fmt: skip
        for item in tl.range(tl.maximum(first - full_count, 0), stop - full_count):
            grad_k_CD, grad_v_CD = _add_key_gradients(
                grad_k_CD, grad_v_CD, k_CD, v_CD, key_C, key_end_C, key_depth_C, q_blocks, grad_blocks, lse_of_head,
                row_term_of_head, key_depth_pointer, head, tl.load(partial_list + item) * ROWS, past, num_keys,
                scale_log2, cap_log2, window, ROWS, True, OF_KEYS, OF_VALUES, CAPPED, WINDOWED, PRECISION,
            )  # fmt: skip
    if slot < 0:
        grad_k_offset_C = key_row_C * grad_k_stride_token + key_head * HEAD_SIZE
        grad_v_offset_C = key_row_C * grad_v_stride_token + key_head * VALUE_SIZE
        if OF_KEYS:
            store_rows(grad_k_pointer, grad_k_offset_C, grad_k_CD * scale, exists_C, HEAD_SIZE, PADDED_SIZE)
        if OF_VALUES:
            store_rows(grad_v_pointer, grad_v_offset_C, grad_v_CD, exists_C, VALUE_SIZE, PADDED_VALUE_SIZE)
    else:
        sum_offset_C = ((key_head * num_slots + slot) * 2 * KEYS + tl.arange(0, KEYS)) * SUM_SIZE
        if OF_KEYS:
            store_rows(piece_sum_pointer, sum_offset_C, grad_k_CD * scale, key_C >= 0, PADDED_SIZE, PADDED_SIZE)
        if OF_VALUES:
            sum_offset_C += KEYS * SUM_SIZE
            store_rows(piece_sum_pointer, sum_offset_C, grad_v_CD, key_C >= 0, PADDED_VALUE_SIZE, PADDED_VALUE_SIZE)


@triton.jit(do_not_specialize=["num_keys", "num_slots"])
def sum_pieces_kernel(
    piece_sum_pointer: tl.tensor,
    grad_k_pointer: tl.tensor,
    grad_v_pointer: tl.tensor,
    first_slot_pointer: tl.tensor,
    slot_count_pointer: tl.tensor,
    grad_k_stride_token: tl.tensor,
    grad_v_stride_token: tl.tensor,
    num_keys: tl.tensor,
    num_slots: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
    SUM_SIZE: tl.constexpr,
) -> None:
    """Sum the pieces of each cut block in order. Grid: (ROWS of the keys, key heads)."""
    key_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    key_head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * ROWS // KEYS
    count = tl.load(slot_count_pointer + block)
    if count == 0:
        return
    first_row = (key_head * num_slots + tl.load(first_slot_pointer + block)) * 2 * KEYS
    sum_offset_R = (first_row + key_R % KEYS) * SUM_SIZE
    grad_k_RD = tl.zeros([ROWS, PADDED_SIZE], tl.float32)
    grad_v_RD = tl.zeros([ROWS, PADDED_VALUE_SIZE], tl.float32)
    for _ in range(count):
        if OF_KEYS:
            grad_k_RD += load_rows(piece_sum_pointer, sum_offset_R, key_R >= 0, PADDED_SIZE, PADDED_SIZE, False)
        sum_offset_R += KEYS * SUM_SIZE
        if OF_VALUES:
            grad_v_RD += load_rows(
                piece_sum_pointer, sum_offset_R, key_R >= 0, PADDED_VALUE_SIZE, PADDED_VALUE_SIZE, False
            )
        sum_offset_R += KEYS * SUM_SIZE
    row_R = key_R.to(tl.int64)
    if OF_KEYS:
        grad_k_offset_R = row_R * grad_k_stride_token + key_head * HEAD_SIZE
        store_rows(grad_k_pointer, grad_k_offset_R, grad_k_RD, key_R < num_keys, HEAD_SIZE, PADDED_SIZE)
    if OF_VALUES:
        grad_v_offset_R = row_R * grad_v_stride_token + key_head * VALUE_SIZE
        store_rows(grad_v_pointer, grad_v_offset_R, grad_v_RD, key_R < num_keys, VALUE_SIZE, PADDED_VALUE_SIZE)
