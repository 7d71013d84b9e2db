"""The forward kernel: one program per tile of queries, online softmax over the key blocks that the tile sees.

A block's product with the values is issued in the iteration of the next block, so that it overlaps with that block's
softmax. Legend: N queries, M keys, R rows of a tile (pairs of token and head), C keys of a tile, D padded head size
(that of values in v_CD and acc_RD).
"""

import triton
import triton.language as tl

from tree_kernels.tree_attention.triton_kernels.tile import (
    LOG2_E,
    from_bits,
    key_block_visible,
    load_block,
    load_rows,
    row_token_and_head,
    store_rows,
    tanh_of_half_log2,
    to_bits,
)

# Finite, so that rows without a visible key so far need no special case: 2 ** (-inf - LOWEST) is 0.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _attend(
    acc_RD: tl.tensor,
    top_R: tl.tensor,
    total_R: tl.tensor,
    shrink_R: tl.tensor,
    weight_bits_RC: tl.tensor,
    pending_key: tl.tensor,
    q_RD: tl.tensor,
    query_R: tl.tensor,
    query_depth_R: tl.tensor,
    k_blocks: tl.tensor,
    v_blocks: tl.tensor,
    key_head: tl.tensor,
    key_end_pointer: tl.tensor,
    key_depth_pointer: tl.tensor,
    first_key: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,
    window: tl.tensor,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add the pending block to the output; the block at `first_key` becomes the pending block."""
    k_CD = load_block(k_blocks, first_key, key_head)
    score_RC = tl.dot(q_RD, tl.trans(k_CD), input_precision=PRECISION)
    v_CD = load_block(v_blocks, pending_key, key_head)
    acc_RD = tl.dot(from_bits(weight_bits_RC, v_CD), v_CD, acc_RD * shrink_R[:, None], input_precision=PRECISION)
    if CAPPED:
        score_RC = tanh_of_half_log2(score_RC * scale_log2) * cap_log2
    if MASKED:
        visible_RC = key_block_visible(
            query_R, query_depth_R, key_end_pointer, key_depth_pointer, first_key, window, KEYS, WINDOWED
        )
        score_RC = tl.where(visible_RC, score_RC, float("-inf"))
    if CAPPED:
        new_top_R = tl.maximum(top_R, tl.max(score_RC, 1))
        weight_RC = tl.math.exp2(score_RC - new_top_R[:, None])
    else:
        # The scale is positive, so it can be applied after the maximum and fused with the subtraction.
        new_top_R = tl.maximum(top_R, tl.max(score_RC, 1) * scale_log2)
        weight_RC = tl.math.exp2(score_RC * scale_log2 - new_top_R[:, None])
    shrink_R = tl.math.exp2(top_R - new_top_R)
    total_R = total_R * shrink_R + tl.sum(weight_RC, 1)
    return acc_RD, new_top_R, total_R, shrink_R, to_bits(weight_RC.to(v_CD.dtype)), first_key


@triton.jit(do_not_specialize=["num_queries", "num_keys", "list_stride", "row_stride", "window"])
def forward_kernel(
    q_pointer: tl.tensor,
    k_blocks: tl.tensor,
    v_blocks: tl.tensor,
    sinks_pointer: tl.tensor,
    out_pointer: tl.tensor,
    lse_pointer: tl.tensor,
    key_end_pointer: tl.tensor,
    key_depth_pointer: tl.tensor,
    full_count_pointer: tl.tensor,
    full_index_pointer: tl.tensor,
    partial_count_pointer: tl.tensor,
    partial_index_pointer: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    out_stride_token: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    list_stride: tl.tensor,
    row_stride: tl.tensor,
    window: tl.tensor,
    scale_log2: tl.tensor,
    cap_log2: tl.tensor,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
) -> None:
    """Output [N, Hq, E] and log-sum-exp [Hq, row_stride] (natural, sinks included).

    Grid: (query tiles, query heads / PACK); PACK is GROUP or 1. Late tiles have the most ancestors and start first.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    token_R, head_R, in_tile_R = row_token_and_head(tile, tl.program_id(1), ROWS, TOKENS, PACK)
    key_head = tl.program_id(1) * PACK // GROUP
    exists_R = in_tile_R & (token_R < num_queries)
    q_offset_R = token_R.to(tl.int64) * q_stride_token + head_R.to(tl.int64) * q_stride_head
    q_RD = load_rows(q_pointer, q_offset_R, exists_R, HEAD_SIZE, PADDED_SIZE, IN_REGISTERS)
    query_R = token_R + (num_keys - num_queries)
    query_depth_R = query_R
    if WINDOWED:
        query_depth_R = tl.load(key_depth_pointer + query_R, mask=exists_R, other=0)
    full_count, full_list = tl.load(full_count_pointer + tile), full_index_pointer + tile * list_stride
    partial_count, partial_list = tl.load(partial_count_pointer + tile), partial_index_pointer + tile * list_stride

    acc_RD = tl.zeros([ROWS, PADDED_VALUE_SIZE], tl.float32)
    top_R = tl.full([ROWS], LOWEST, tl.float32)
    total_R = tl.zeros([ROWS], tl.float32)
    # Initially a visible block with weights of 0 is pending.
    shrink_R = tl.full([ROWS], 1.0, tl.float32)
    weight_bits_RC = to_bits(tl.zeros([ROWS, KEYS], q_RD.dtype))
    pending_key = tl.where(full_count > 0, tl.load(full_list), tl.load(partial_list)) * KEYS
    for item in tl.range(0, full_count):
        acc_RD, top_R, total_R, shrink_R, weight_bits_RC, pending_key = _attend(
            acc_RD, top_R, total_R, shrink_R, weight_bits_RC, pending_key, q_RD, query_R, query_depth_R, k_blocks,
            v_blocks, key_head, key_end_pointer, key_depth_pointer, tl.load(full_list + item) * KEYS, scale_log2,
            cap_log2, window, KEYS, False, CAPPED, WINDOWED, PRECISION,
        )  # fmt: skip
    for item in tl.range(0, partial_count):
        acc_RD, top_R, total_R, shrink_R, weight_bits_RC, pending_key = _attend(
            acc_RD, top_R, total_R, shrink_R, weight_bits_RC, pending_key, q_RD, query_R, query_depth_R, k_blocks,
            v_blocks, key_head, key_end_pointer, key_depth_pointer, tl.load(partial_list + item) * KEYS, scale_log2,
            cap_log2, window, KEYS, True, CAPPED, WINDOWED, PRECISION,
        )  # fmt: skip
    v_CD = load_block(v_blocks, pending_key, key_head)
    acc_RD = tl.dot(from_bits(weight_bits_RC, v_CD), v_CD, acc_RD * shrink_R[:, None], input_precision=PRECISION)

    if SINKS:
        sink_R = tl.load(sinks_pointer + head_R, mask=exists_R, other=0.0).to(tl.float32) * LOG2_E
        new_top_R = tl.maximum(top_R, sink_R)
        total_R = total_R * tl.math.exp2(top_R - new_top_R) + tl.math.exp2(sink_R - new_top_R)
        acc_RD = acc_RD * tl.math.exp2(top_R - new_top_R)[:, None]
        top_R = new_top_R
    # Padding rows may have a total of 0; 1 keeps their unused quotient finite.
    total_R = tl.where(exists_R, total_R, 1.0)
    out_offset_R = token_R.to(tl.int64) * out_stride_token + head_R * VALUE_SIZE
    store_rows(out_pointer, out_offset_R, acc_RD / total_R[:, None], exists_R, VALUE_SIZE, PADDED_VALUE_SIZE)
    lse_R = (top_R + tl.math.log2(total_R)) / LOG2_E
    tl.store(lse_pointer + head_R.to(tl.int64) * row_stride + token_R, lse_R, mask=exists_R)
