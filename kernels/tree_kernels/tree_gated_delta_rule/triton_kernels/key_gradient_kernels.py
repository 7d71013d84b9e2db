"""Gradients of keys, values and write strengths, all tiles in parallel.

With A the inverse, R = A^T dX for each of its products X = A Y, U the values that a tile writes, S' a state that leaves
after row p, and dO the gradient of the overlaps K K^T of keys:

    dY = R,   dL = -sum of R X^T,
    dK = sum over p of D_pj U_j dS'^T + beta exp(G) R + scale (D * dP)^T Q + (dO + dO^T) K.

Legend: T tiles, C rows, Hk key heads, H value heads, K and V state sizes.
"""

import triton
import triton.language as tl

from tree_kernels.tree_gated_delta_rule.triton_kernels.tile import (
    decay_between,
    exit_decays,
    load_matrix,
    load_matrix_columns,
    load_path,
    load_rows,
    load_state,
    row_offsets,
    store_matrix,
    store_path_part,
    store_rows,
    token_offsets,
    visible_rows,
)


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
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    d_v_pointer: tl.tensor,
    d_beta_pointer: tl.tensor,
    d_overlap_pointer: tl.tensor,
    d_path_pointer: tl.tensor,
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
    """dV [N, H, V], dbeta [N, H] float32, dO [T, H, C, C], two parts of dG. Grid: (T, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    gate_rows = token.to(tl.int64) * HEADS + head
    beta = tl.load(beta_pointer + gate_rows, mask=exists, other=0.0).to(tl.float32)
    high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
    entry_decay = tl.exp(high + low)
    key_rows = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    value_rows = token_offsets(token, head, HEADS, V)
    square_rows = row_offsets(tile, head, HEADS, C, C)
    reads_rows = row_offsets(tile, head, HEADS, C, K)
    written_rows = row_offsets(tile, head, HEADS, C, V)
    inverse_ji = load_matrix_columns(inverse_pointer, square_rows, 0, C)
    d_beta, d_path = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    d_lower = tl.zeros([C, C], tl.float32)
    for block in range(V // BV):
        d_written = load_matrix(d_written_pointer, written_rows, block * BV, BV)
        back = tl.dot(inverse_ji, d_written, input_precision="ieee")
        v = load_rows(v_pointer, value_rows, exists, block * BV, BV)
        d_beta += tl.sum(back * v.to(tl.float32), 1)
        store_rows(d_v_pointer, back * beta[:, None], value_rows, exists, block * BV, BV)
        own = load_matrix(own_pointer, written_rows, block * BV, BV)
        d_lower = tl.dot(back.to(own.dtype), tl.trans(own), d_lower, input_precision="ieee")
    overlap = tl.zeros([C, C], tl.float32)
    for block in range(K // BK):
        d_reads = load_matrix(d_reads_pointer, reads_rows, block * BK, BK)
        back = tl.dot(inverse_ji, d_reads, input_precision="ieee")
        k = load_rows(k_pointer, key_rows, exists, block * BK, BK)
        decayed = tl.sum(back * k.to(tl.float32), 1) * entry_decay
        d_beta += decayed
        d_path += decayed * beta
        reads = load_matrix(reads_pointer, reads_rows, block * BK, BK)
        d_lower = tl.dot(back.to(reads.dtype), tl.trans(reads), d_lower, input_precision="ieee")
        overlap = tl.dot(k, tl.trans(k), overlap, input_precision="ieee")
    end = tl.load(row_end_pointer + tile * C + row)
    strictly = visible_rows(row[:, None], row[None, :], end[None, :]) & (row[None, :] < row[:, None])
    d_overlap = -d_lower * decay_between(strictly, high[:, None], low[:, None], high[None, :], low[None, :])
    d_beta += tl.sum(d_overlap * overlap, 1)
    tl.store(d_beta_pointer + gate_rows, d_beta, mask=exists)
    d_overlap = d_overlap * beta[:, None]
    store_matrix(d_overlap_pointer, d_overlap, square_rows, 0, C)
    of_decay = d_overlap * overlap
    store_path_part(d_path_pointer, d_path + tl.sum(of_decay, 1), 0, tile, head, num_tiles, HEADS, C)
    store_path_part(d_path_pointer, -tl.sum(of_decay, 0), 1, tile, head, num_tiles, HEADS, C)


@triton.jit
def _through_exit(
    d_state_pointer: tl.tensor,
    entry_pointer: tl.tensor,
    written_pointer: tl.tensor,
    k: tl.tensor,
    weight: tl.tensor,
    kept_part: tl.tensor,
    exit_row: tl.tensor,
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
    """What one state that leaves the tile adds to BK columns of dK, [C, BK], and through these columns to dG, [C]."""
    d_k = tl.zeros([C, BK], tl.float32)
    overlap = 0.0
    written_rows = row_offsets(tile, head, HEADS, C, V)
    for block in range(V // BV):
        written = load_matrix(written_pointer, written_rows, block * BV, BV)
        d_state = load_state(d_state_pointer, index, head, first, block * BV, HEADS, K, V, BK, BV, True)
        d_k = tl.dot(written, d_state, d_k, input_precision="ieee")
        entry = load_state(entry_pointer, tile, head, first, block * BV, HEADS, K, V, BK, BV, True)
        overlap += tl.sum(entry.to(tl.float32) * d_state.to(tl.float32))
    d_k = d_k * weight[:, None]
    through = tl.sum(d_k * k.to(tl.float32), 1)
    to_exit = tl.where(tl.arange(0, C) == exit_row, tl.sum(through, 0) + kept_part * overlap, 0.0)
    return d_k, to_exit - through


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def exit_gradients_kernel(
    k_pointer: tl.tensor,
    written_pointer: tl.tensor,
    entry_pointer: tl.tensor,
    d_main_pointer: tl.tensor,
    d_side_pointer: tl.tensor,
    path_pointer: tl.tensor,
    to_exit_pointer: tl.tensor,
    kept_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    main_row_pointer: tl.tensor,
    side_start_pointer: tl.tensor,
    side_row_pointer: tl.tensor,
    d_k_pointer: tl.tensor,
    d_path_pointer: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    SIDES: tl.constexpr,
) -> None:
    """Contribution of states that leave tiles to dK [N, Hk, K], and K / BK parts of dG. Grid: (T, Hk).

    SIDES is False if no tile has side exits.
    """
    tile, key_head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    key_rows = token_offsets(token, key_head, HEADS // GROUP, K)
    main_row = tl.load(main_row_pointer + tile)
    first_side = tl.load(side_start_pointer + tile)
    sides = tl.load(side_start_pointer + tile + 1) - first_side
    for part in tl.static_range(K // BK):
        k = load_rows(k_pointer, key_rows, exists, part * BK, BK)
        total = tl.zeros([C, BK], tl.float32)
        for number in range(GROUP):
            head = key_head * GROUP + number
            of_tile = tile.to(tl.int64) * HEADS + head
            weight = tl.load(to_exit_pointer + of_tile * C + row)
            kept_part = tl.load(kept_pointer + of_tile)
            d_k, d_path = _through_exit(
                d_main_pointer, entry_pointer, written_pointer, k, weight, kept_part, main_row, tile, tile, head,
                part * BK, HEADS, K, V, BK, BV, C,
            )  # fmt: skip
            total += d_k
            if SIDES:
                for index in range(sides):
                    side = first_side + index
                    side_row = tl.load(side_row_pointer + side)
                    weight, kept_part = exit_decays(
                        path_pointer, row_end_pointer, side_row, tile, head, num_tiles, HEADS, C
                    )
                    d_k, d_path_of_side = _through_exit(
                        d_side_pointer, entry_pointer, written_pointer, k, weight, kept_part, side_row, side, tile,
                        head, part * BK, HEADS, K, V, BK, BV, C,
                    )  # fmt: skip
                    total += d_k
                    d_path += d_path_of_side
            store_path_part(d_path_pointer, d_path, part, tile, head, num_tiles, HEADS, C)
        store_rows(d_k_pointer, total, key_rows, exists, part * BK, BK)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def key_gradients_kernel(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    beta_pointer: tl.tensor,
    inverse_pointer: tl.tensor,
    d_reads_pointer: tl.tensor,
    d_scores_pointer: tl.tensor,
    d_overlap_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    d_k_pointer: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    CORRECTS: tl.constexpr,
) -> None:
    """Add the rest of dK, summed over the value heads of a key head. Grid: (T, Hk).

    Without CORRECTS, that is the part of the scores.
    """
    tile, key_head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    key_rows = token_offsets(token, key_head, HEADS // GROUP, K)
    for part in tl.static_range(K // BK):
        q = load_rows(q_pointer, key_rows, exists, part * BK, BK)
        k = load_rows(k_pointer, key_rows, exists, part * BK, BK)
        total = load_rows(d_k_pointer, key_rows, exists, part * BK, BK).to(tl.float32)
        for number in range(GROUP):
            head = key_head * GROUP + number
            square_rows = row_offsets(tile, head, HEADS, C, C)
            if CORRECTS:
                gate_rows = token.to(tl.int64) * HEADS + head
                beta = tl.load(beta_pointer + gate_rows, mask=exists, other=0.0).to(tl.float32)
                high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
                inverse_ji = load_matrix_columns(inverse_pointer, square_rows, 0, C)
                d_reads = load_matrix(d_reads_pointer, row_offsets(tile, head, HEADS, C, K), part * BK, BK)
                total += tl.dot(inverse_ji, d_reads, input_precision="ieee") * (beta * tl.exp(high + low))[:, None]
            d_scores_ji = load_matrix(d_scores_pointer, square_rows, 0, C)
            total = tl.dot(d_scores_ji, q, total, input_precision="ieee")
            if CORRECTS:
                d_overlap = load_matrix(d_overlap_pointer, square_rows, 0, C)
                total = tl.dot(d_overlap, k, total, input_precision="ieee")
                d_overlap_ji = load_matrix_columns(d_overlap_pointer, square_rows, 0, C)
                total = tl.dot(d_overlap_ji, k, total, input_precision="ieee")
        store_rows(d_k_pointer, total, key_rows, exists, part * BK, BK)
