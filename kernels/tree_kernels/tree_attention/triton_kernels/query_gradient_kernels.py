"""The backward kernel of queries, and the row term that all backward kernels read.

Weights are recomputed from the log-sum-exp. Legend: N queries, M keys, R rows of a tile (pairs of token and head), C
keys of a tile, D padded head size (that of values in v_CD and grad_RD).
"""

import triton
import triton.language as tl

from tree_kernels.tree_attention.triton_kernels.tile import (
    LOG2_E,
    key_block_visible,
    load_block,
    load_rows,
    row_token_and_head,
    softmax_weights,
    store_rows,
)


@triton.jit(do_not_specialize=["num_queries", "row_stride"])
def row_term_kernel(
    out_pointer: tl.tensor,
    grad_pointer: tl.tensor,
    grad_lse_pointer: tl.tensor,
    row_term_pointer: tl.tensor,
    out_stride_token: tl.tensor,
    grad_stride_token: tl.tensor,
    grad_stride_head: tl.tensor,
    grad_lse_stride_token: tl.tensor,
    grad_lse_stride_head: tl.tensor,
    num_queries: tl.tensor,
    row_stride: tl.tensor,
    ROWS: tl.constexpr,
    LSE_GRADIENT: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
) -> None:
    """Row term [Hq, row_stride] = out . grad - grad of the log-sum-exp: d score = weight (d weight - row term).

    Grid: (tiles of tokens up to row_stride, query heads). Padding rows get 0.
    """
    head = tl.program_id(1).to(tl.int64)
    token_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists_R, row_R = token_R < num_queries, token_R.to(tl.int64)
    out_offset_R = row_R * out_stride_token + head * HEAD_SIZE
    grad_offset_R = row_R * grad_stride_token + head * grad_stride_head
    out_RD = load_rows(out_pointer, out_offset_R, exists_R, HEAD_SIZE, PADDED_SIZE, False)
    grad_RD = load_rows(grad_pointer, grad_offset_R, exists_R, HEAD_SIZE, PADDED_SIZE, False)
    row_term_R = tl.sum(out_RD.to(tl.float32) * grad_RD.to(tl.float32), 1)
    if LSE_GRADIENT:
        grad_lse_pointer_R = grad_lse_pointer + head * grad_lse_stride_head + row_R * grad_lse_stride_token
        row_term_R -= tl.load(grad_lse_pointer_R, mask=exists_R, other=0.0).to(tl.float32)
    tl.store(row_term_pointer + head * row_stride + token_R, row_term_R)


@triton.jit
def _add_query_gradient(
    grad_q_RD: tl.tensor,
    q_RD: tl.tensor,
    grad_RD: tl.tensor,
    lse_log2_R: tl.tensor,
    row_term_R: tl.tensor,
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
) -> tl.tensor:
    """Add the contribution of one key block to the gradient of the queries, without the scale."""
    k_CD = load_block(k_blocks, first_key, key_head)
    v_CD = load_block(v_blocks, first_key, key_head)
    raw_RC = tl.dot(q_RD, tl.trans(k_CD), input_precision=PRECISION)
    weight_RC, slope_RC = softmax_weights(raw_RC, lse_log2_R[:, None], scale_log2, cap_log2, CAPPED)
    if MASKED:
        visible_RC = key_block_visible(
            query_R, query_depth_R, key_end_pointer, key_depth_pointer, first_key, window, KEYS, WINDOWED
        )
        weight_RC = tl.where(visible_RC, weight_RC, 0.0)
    grad_weight_RC = tl.dot(grad_RD, tl.trans(v_CD), input_precision=PRECISION)
    grad_raw_RC = weight_RC * (grad_weight_RC - row_term_R[:, None])
    if CAPPED:
        grad_raw_RC = grad_raw_RC * slope_RC
    return tl.dot(grad_raw_RC.to(k_CD.dtype), k_CD, grad_q_RD, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "list_stride", "row_stride", "window"])
def query_gradient_kernel(
    q_pointer: tl.tensor,
    k_blocks: tl.tensor,
    v_blocks: tl.tensor,
    grad_pointer: tl.tensor,
    lse_pointer: tl.tensor,
    row_term_pointer: tl.tensor,
    grad_q_pointer: tl.tensor,
    key_end_pointer: tl.tensor,
    key_depth_pointer: tl.tensor,
    full_count_pointer: tl.tensor,
    full_index_pointer: tl.tensor,
    partial_count_pointer: tl.tensor,
    partial_index_pointer: tl.tensor,
    q_stride_token: tl.tensor,
    q_stride_head: tl.tensor,
    grad_stride_token: tl.tensor,
    grad_stride_head: tl.tensor,
    grad_q_stride_token: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    list_stride: tl.tensor,
    row_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
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
    PRECISION: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED_VALUE_SIZE: tl.constexpr,
) -> None:
    """Gradient [N, Hq, D] of the queries. Grid and tiles as in the forward kernel."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    token_R, head_R, in_tile_R = row_token_and_head(tile, tl.program_id(1), ROWS, TOKENS, PACK)
    key_head = tl.program_id(1) * PACK // GROUP
    exists_R = in_tile_R & (token_R < num_queries)
    row_R, head_row_R = token_R.to(tl.int64), head_R.to(tl.int64)
    q_offset_R = row_R * q_stride_token + head_row_R * q_stride_head
    grad_offset_R = row_R * grad_stride_token + head_row_R * grad_stride_head
    q_RD = load_rows(q_pointer, q_offset_R, exists_R, HEAD_SIZE, PADDED_SIZE, IN_REGISTERS)
    grad_RD = load_rows(grad_pointer, grad_offset_R, exists_R, VALUE_SIZE, PADDED_VALUE_SIZE, IN_REGISTERS)
    lse_log2_R = tl.load(lse_pointer + head_row_R * row_stride + token_R, mask=exists_R, other=0.0) * LOG2_E
    row_term_R = tl.load(row_term_pointer + head_row_R * row_stride + token_R, mask=exists_R, other=0.0)
    query_R = token_R + (num_keys - num_queries)
    query_depth_R = query_R
    if WINDOWED:
        query_depth_R = tl.load(key_depth_pointer + query_R, mask=exists_R, other=0)

    grad_q_RD = tl.zeros([ROWS, PADDED_SIZE], tl.float32)
    for item in tl.range(0, tl.load(full_count_pointer + tile)):
        first_key = tl.load(full_index_pointer + tile * list_stride + item) * KEYS
        grad_q_RD = _add_query_gradient(
            grad_q_RD, q_RD, grad_RD, lse_log2_R, row_term_R, query_R, query_depth_R, k_blocks, v_blocks, key_head,
            key_end_pointer, key_depth_pointer, first_key, scale_log2, cap_log2, window, KEYS, False, CAPPED, WINDOWED,
            PRECISION,
        )  # fmt: skip
    for item in tl.range(0, tl.load(partial_count_pointer + tile)):
        first_key = tl.load(partial_index_pointer + tile * list_stride + item) * KEYS
        grad_q_RD = _add_query_gradient(
            grad_q_RD, q_RD, grad_RD, lse_log2_R, row_term_R, query_R, query_depth_R, k_blocks, v_blocks, key_head,
            key_end_pointer, key_depth_pointer, first_key, scale_log2, cap_log2, window, KEYS, True, CAPPED, WINDOWED,
            PRECISION,
        )  # fmt: skip
    grad_q_offset_R = row_R * grad_q_stride_token + head_R * HEAD_SIZE
    store_rows(grad_q_pointer, grad_q_offset_R, grad_q_RD * scale, exists_R, HEAD_SIZE, PADDED_SIZE)
