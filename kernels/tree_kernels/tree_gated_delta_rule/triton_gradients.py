"""Gradients of queries, keys, values and gates, all tiles at once, from the gradients of writes and states.

With P = scale D * Q K^T, U what a tile writes, S the state that enters, S' a state that leaves after row p:

    dQ = scale exp(G) (dO S^T) + scale (D * dP) K,   dW = -dU S^T,   dP = dO U^T
    dK = scale (D * dP)^T Q + sum over p of D_pj U_j dS'^T + (terms of the inverse, second kernel).

Each gradient of a decay D_ij adds to G_i and leaves G_j. Products needed in both orders are formed twice, since a
transposed register operand is miscompiled on Hopper. Legend: T tiles, C rows, H value heads, K and V state sizes.
"""

import triton
import triton.language as tl

from tree_kernels.tree_gated_delta_rule.triton_tile import (
    decay_between,
    exit_decays,
    load_matrix,
    load_matrix_columns,
    load_path,
    load_rows,
    load_state_transposed,
    row_offsets,
    store_matrix,
    store_rows,
    token_offsets,
    visible_rows,
)


@triton.jit
def _both_scores(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    key_rows: tl.tensor,
    exists: tl.tensor,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Q K^T and K Q^T, [C, C]."""
    scores, scores_ji = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for block in tl.static_range(K // BK):
        q = load_rows(q_pointer, key_rows, exists, block * BK, BK)
        k = load_rows(k_pointer, key_rows, exists, block * BK, BK)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        scores_ji = tl.dot(k, tl.trans(q), scores_ji, input_precision="ieee")
    return scores, scores_ji


@triton.jit
def _exit_keys(
    d_state_pointer: tl.tensor,
    entry_pointer: tl.tensor,
    written_pointer: tl.tensor,
    index: tl.tensor,
    tile: tl.tensor,
    head: tl.tensor,
    first: int,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """U dS'^T for BK keys, [C, BK], and the sum of S * dS' over them."""
    product = tl.zeros([C, BK], tl.float32)
    overlap = 0.0
    written_rows = row_offsets(tile, head, HEADS, C, V)
    for block in tl.static_range(V // BV):
        written = load_matrix(written_pointer, written_rows, block * BV, BV)
        d_state = load_state_transposed(d_state_pointer, index, head, first, block * BV, HEADS, K, V, BK, BV)
        product = tl.dot(written, d_state, product, input_precision="ieee")
        entry = load_state_transposed(entry_pointer, tile, head, first, block * BV, HEADS, K, V, BK, BV)
        overlap += tl.sum(entry.to(tl.float32) * d_state.to(tl.float32))
    return product, overlap


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def score_gradients_kernel(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    written_pointer: tl.tensor,
    entry_pointer: tl.tensor,
    d_out_pointer: tl.tensor,
    d_written_pointer: tl.tensor,
    d_main_pointer: tl.tensor,
    d_side_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    main_row_pointer: tl.tensor,
    side_start_pointer: tl.tensor,
    side_row_pointer: tl.tensor,
    d_q_pointer: tl.tensor,
    d_k_pointer: tl.tensor,
    d_reads_pointer: tl.tensor,
    d_path_pointer: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """dQ and the first part of dK [N, H, K], dW [T, H, C, K], dG [T, H, C] so far. Grid: (T, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    key_rows = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    out_rows = token_offsets(token, head, HEADS, V)
    own_key_rows = token_offsets(token, head, HEADS, K)
    written_rows = row_offsets(tile, head, HEADS, C, V)
    scores, scores_ji = _both_scores(q_pointer, k_pointer, key_rows, exists, K, BK, C)
    d_scores, d_scores_ji = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for block in tl.static_range(V // BV):
        d_out = load_rows(d_out_pointer, out_rows, exists, block * BV, BV)
        written = load_matrix(written_pointer, written_rows, block * BV, BV)
        d_scores = tl.dot(d_out, tl.trans(written), d_scores, input_precision="ieee")
        d_scores_ji = tl.dot(written, tl.trans(d_out), d_scores_ji, input_precision="ieee")
    high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
    end = tl.load(row_end_pointer + tile * C + row)
    sees = visible_rows(row[:, None], row[None, :], end[None, :])
    d_scores = d_scores * decay_between(sees, high[:, None], low[:, None], high[None, :], low[None, :]) * scale
    d_path = tl.sum(d_scores * scores, 1)
    seen = visible_rows(row[None, :], row[:, None], end[:, None])
    decay_ji = decay_between(seen, high[None, :], low[None, :], high[:, None], low[:, None])
    d_scores_ji = d_scores_ji * decay_ji * scale
    d_path -= tl.sum(d_scores_ji * scores_ji, 1)
    low_scores, low_scores_ji = d_scores.to(q_pointer.dtype.element_ty), d_scores_ji.to(q_pointer.dtype.element_ty)
    entry_decay = scale * tl.exp(high + low)
    main_row = tl.load(main_row_pointer + tile)
    weight, kept_part = exit_decays(path_pointer, row_end_pointer, main_row, tile, head, num_tiles, HEADS, C)

    first_side = tl.load(side_start_pointer + tile)
    sides = tl.load(side_start_pointer + tile + 1) - first_side
    for part in tl.static_range(K // BK):
        d_q, d_reads = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
        for block in tl.static_range(V // BV):
            entry = load_state_transposed(entry_pointer, tile, head, part * BK, block * BV, HEADS, K, V, BK, BV)
            d_out = load_rows(d_out_pointer, out_rows, exists, block * BV, BV)
            d_q = tl.dot(d_out, entry, d_q, input_precision="ieee")
            d_written = load_matrix(d_written_pointer, written_rows, block * BV, BV)
            d_reads = tl.dot(d_written, entry, d_reads, input_precision="ieee")
        store_matrix(d_reads_pointer, -d_reads, row_offsets(tile, head, HEADS, C, K), part * BK, BK)
        q = load_rows(q_pointer, key_rows, exists, part * BK, BK)
        k = load_rows(k_pointer, key_rows, exists, part * BK, BK)
        d_q = d_q * entry_decay[:, None]
        d_path += tl.sum(d_q * q.to(tl.float32), 1)
        d_q = tl.dot(low_scores, k, d_q, input_precision="ieee")
        store_rows(d_q_pointer, d_q, own_key_rows, exists, part * BK, BK)

        d_k, overlap = _exit_keys(
            d_main_pointer, entry_pointer, written_pointer, tile, tile, head, part * BK, HEADS, K, V, BK, BV, C
        )
        d_k = d_k * weight[:, None]
        through = tl.sum(d_k * k.to(tl.float32), 1)
        d_path += tl.where(row == main_row, tl.sum(through, 0) + kept_part * overlap, 0.0) - through
        for number in range(sides):
            side = first_side + number
            side_row = tl.load(side_row_pointer + side)
            side_weight, side_part = exit_decays(
                path_pointer, row_end_pointer, side_row, tile, head, num_tiles, HEADS, C
            )
            side_k, overlap = _exit_keys(
                d_side_pointer, entry_pointer, written_pointer, side, tile, head, part * BK, HEADS, K, V, BK, BV, C
            )
            side_k = side_k * side_weight[:, None]
            through = tl.sum(side_k * k.to(tl.float32), 1)
            d_path += tl.where(row == side_row, tl.sum(through, 0) + side_part * overlap, 0.0) - through
            d_k += side_k
        d_k = tl.dot(low_scores_ji, q, d_k, input_precision="ieee")
        store_rows(d_k_pointer, d_k, own_key_rows, exists, part * BK, BK)
    tl.store(d_path_pointer + (tile.to(tl.int64) * HEADS + head) * C + row, d_path)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def inverse_gradients_kernel(
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    beta_pointer: tl.tensor,
    inverse_pointer: tl.tensor,
    reads_pointer: tl.tensor,
    own_pointer: tl.tensor,
    d_written_pointer: tl.tensor,
    d_reads_pointer: tl.tensor,
    d_path_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    d_k_pointer: tl.tensor,
    d_v_pointer: tl.tensor,
    d_g_pointer: tl.tensor,
    d_beta_pointer: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """The rest of dK, dV [N, H, V], dg and dbeta [N, H] float32. Grid: (T, H).

    With R = inverse^T dX for each product X = inverse Y: dY = R, and dL = -sum of R X^T.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    gate_rows = token.to(tl.int64) * HEADS + head
    beta = tl.load(beta_pointer + gate_rows, mask=exists, other=0.0).to(tl.float32)
    high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
    entry_decay = tl.exp(high + low)
    key_rows = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    own_key_rows = token_offsets(token, head, HEADS, K)
    value_rows = token_offsets(token, head, HEADS, V)
    inverse_rows = row_offsets(tile, head, HEADS, C, C)
    reads_rows = row_offsets(tile, head, HEADS, C, K)
    written_rows = row_offsets(tile, head, HEADS, C, V)
    inverse = load_matrix(inverse_pointer, inverse_rows, 0, C)
    inverse_ji = load_matrix_columns(inverse_pointer, inverse_rows, 0, C)
    d_path = tl.load(d_path_pointer + (tile.to(tl.int64) * HEADS + head) * C + row)
    d_beta = tl.zeros([C], tl.float32)
    d_lower, d_lower_ji = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for block in tl.static_range(V // BV):
        d_written = load_matrix(d_written_pointer, written_rows, block * BV, BV)
        back = tl.dot(inverse_ji, d_written, input_precision="ieee")
        v = load_rows(v_pointer, value_rows, exists, block * BV, BV)
        d_beta += tl.sum(back * v.to(tl.float32), 1)
        store_rows(d_v_pointer, back * beta[:, None], value_rows, exists, block * BV, BV)
        own = load_matrix(own_pointer, written_rows, block * BV, BV)
        d_lower = tl.dot(back.to(own.dtype), tl.trans(own), d_lower, input_precision="ieee")
        d_written_columns = load_matrix_columns(d_written_pointer, written_rows, block * BV, BV)
        back_columns = tl.dot(d_written_columns, inverse, input_precision="ieee")
        d_lower_ji = tl.dot(own, back_columns.to(own.dtype), d_lower_ji, input_precision="ieee")
    overlap = tl.zeros([C, C], tl.float32)
    for block in tl.static_range(K // BK):
        d_reads = load_matrix(d_reads_pointer, reads_rows, block * BK, BK)
        back = tl.dot(inverse_ji, d_reads, input_precision="ieee")
        k = load_rows(k_pointer, key_rows, exists, block * BK, BK)
        decayed = tl.sum(back * k.to(tl.float32), 1) * entry_decay
        d_beta += decayed
        d_path += decayed * beta
        reads = load_matrix(reads_pointer, reads_rows, block * BK, BK)
        d_lower = tl.dot(back.to(reads.dtype), tl.trans(reads), d_lower, input_precision="ieee")
        d_reads_columns = load_matrix_columns(d_reads_pointer, reads_rows, block * BK, BK)
        back_columns = tl.dot(d_reads_columns, inverse, input_precision="ieee")
        d_lower_ji = tl.dot(reads, back_columns.to(reads.dtype), d_lower_ji, input_precision="ieee")
        overlap = tl.dot(k, tl.trans(k), overlap, input_precision="ieee")
    end = tl.load(row_end_pointer + tile * C + row)
    sees = visible_rows(row[:, None], row[None, :], end[None, :])
    strictly = sees & (row[None, :] < row[:, None])
    decay = decay_between(strictly, high[:, None], low[:, None], high[None, :], low[None, :])
    d_overlap = -d_lower * decay
    d_beta_row = tl.sum(d_overlap * overlap, 1)
    d_beta += d_beta_row
    d_path += d_beta_row * beta
    d_overlap = d_overlap * beta[:, None]
    strictly_ji = visible_rows(row[None, :], row[:, None], end[:, None]) & (row[:, None] < row[None, :])
    decay_ji = decay_between(strictly_ji, high[None, :], low[None, :], high[:, None], low[:, None])
    d_overlap_ji = -d_lower_ji * decay_ji * beta[None, :]
    d_path -= tl.sum(d_overlap_ji * overlap, 1)
    both = (d_overlap + d_overlap_ji).to(k_pointer.dtype.element_ty)
    for block in tl.static_range(K // BK):
        d_reads = load_matrix(d_reads_pointer, reads_rows, block * BK, BK)
        d_k = tl.dot(inverse_ji, d_reads, input_precision="ieee") * (beta * entry_decay)[:, None]
        d_k += load_rows(d_k_pointer, own_key_rows, exists, block * BK, BK).to(tl.float32)
        k = load_rows(k_pointer, key_rows, exists, block * BK, BK)
        d_k = tl.dot(both, k, d_k, input_precision="ieee")
        store_rows(d_k_pointer, d_k, own_key_rows, exists, block * BK, BK)
    tl.store(d_beta_pointer + gate_rows, d_beta, mask=exists)
    # The gate of a token adds to the path sum of every row below it.
    d_g = tl.sum(tl.where(sees, d_path[:, None], 0.0), 0)
    tl.store(d_g_pointer + gate_rows, d_g, mask=exists)
