"""Gradients of queries, of W (see `products_kernel`), of U, and of gates, all tiles in parallel.

With P = scale D * Q K^T, U the values that a tile writes, S its entry state:

    dP = dO U^T,   dU of the tile itself = P^T dO,   dQ = scale exp(G) (dO S^T) + scale (D * dP) K,   dW = -dU S^T.

The gradient of a decay D_ij is added to dG_i and subtracted from dG_j. A matrix that is needed transposed is stored and
read in the other order by a later kernel, because a transposed register operand is miscompiled on Hopper. Loops over
blocks are not unrolled, because loading all blocks at once would spill registers.
Legend: T tiles, C rows, Hk key heads, H value heads, K and V state sizes.
"""

import triton
import triton.language as tl

from tree_kernels.tree_gated_delta_rule.triton_kernels.tile import (
    decay_between,
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
def score_gradients_kernel(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    written_pointer: tl.tensor,
    d_out_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    d_written_pointer: tl.tensor,
    d_scores_pointer: tl.tensor,
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
    """The outputs' part of dU [T, H, C, V], scale (D * dP)^T [T, H, C, C], and two parts of dG.

    Grid: (T, H).
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    key_rows = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    out_rows = token_offsets(token, head, HEADS, V)
    written_rows = row_offsets(tile, head, HEADS, C, V)
    scores_ji = tl.zeros([C, C], tl.float32)
    for block in range(K // BK):
        q = load_rows(q_pointer, key_rows, exists, block * BK, BK)
        k = load_rows(k_pointer, key_rows, exists, block * BK, BK)
        scores_ji = tl.dot(k, tl.trans(q), scores_ji, input_precision="ieee")
    d_scores_ji = tl.zeros([C, C], tl.float32)
    for block in range(V // BV):
        d_out = load_rows(d_out_pointer, out_rows, exists, block * BV, BV)
        written = load_matrix(written_pointer, written_rows, block * BV, BV)
        d_scores_ji = tl.dot(written, tl.trans(d_out), d_scores_ji, input_precision="ieee")
    high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
    end = tl.load(row_end_pointer + tile * C + row)
    seen = visible_rows(row[None, :], row[:, None], end[:, None])
    decay_ji = decay_between(seen, high[None, :], low[None, :], high[:, None], low[:, None]) * scale
    weights = (scores_ji * decay_ji).to(k_pointer.dtype.element_ty)
    d_scores_ji = d_scores_ji * decay_ji
    store_matrix(d_scores_pointer, d_scores_ji, row_offsets(tile, head, HEADS, C, C), 0, C)
    of_decay = d_scores_ji * scores_ji
    store_path_part(d_path_pointer, tl.sum(of_decay, 0), 0, tile, head, num_tiles, HEADS, C)
    store_path_part(d_path_pointer, -tl.sum(of_decay, 1), 1, tile, head, num_tiles, HEADS, C)
    for block in range(V // BV):
        d_out = load_rows(d_out_pointer, out_rows, exists, block * BV, BV)
        d_written = tl.dot(weights, d_out, input_precision="ieee")
        store_matrix(d_written_pointer, d_written, written_rows, block * BV, BV)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def query_gradients_kernel(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    entry_pointer: tl.tensor,
    d_out_pointer: tl.tensor,
    d_written_pointer: tl.tensor,
    d_scores_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    d_q_pointer: tl.tensor,
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
    CORRECTS: tl.constexpr,
) -> None:
    """dQ [N, Hk, K], summed over the value heads of a key head, dW [T, H, C, K] if CORRECTS, K / BK parts of dG.

    Grid: (T, Hk).
    """
    tile, key_head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    key_rows = token_offsets(token, key_head, HEADS // GROUP, K)
    for part in tl.static_range(K // BK):
        q = load_rows(q_pointer, key_rows, exists, part * BK, BK).to(tl.float32)
        k = load_rows(k_pointer, key_rows, exists, part * BK, BK)
        total = tl.zeros([C, BK], tl.float32)
        for number in range(GROUP):
            head = key_head * GROUP + number
            out_rows = token_offsets(token, head, HEADS, V)
            written_rows = row_offsets(tile, head, HEADS, C, V)
            d_q, d_reads = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
            for block in range(V // BV):
                entry = load_state(entry_pointer, tile, head, part * BK, block * BV, HEADS, K, V, BK, BV, True)
                d_out = load_rows(d_out_pointer, out_rows, exists, block * BV, BV)
                d_q = tl.dot(d_out, entry, d_q, input_precision="ieee")
                if CORRECTS:
                    d_written = load_matrix(d_written_pointer, written_rows, block * BV, BV)
                    d_reads = tl.dot(d_written, entry, d_reads, input_precision="ieee")
            if CORRECTS:
                store_matrix(d_reads_pointer, -d_reads, row_offsets(tile, head, HEADS, C, K), part * BK, BK)
            high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
            d_q = d_q * (scale * tl.exp(high + low))[:, None]
            store_path_part(d_path_pointer, tl.sum(d_q * q, 1), part, tile, head, num_tiles, HEADS, C)
            d_scores = load_matrix_columns(d_scores_pointer, row_offsets(tile, head, HEADS, C, C), 0, C)
            total = tl.dot(d_scores, k, total + d_q, input_precision="ieee")
        store_rows(d_q_pointer, total, key_rows, exists, part * BK, BK)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def gate_gradients_kernel(
    d_path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    d_g_pointer: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """dg [N, H] float32 from the parts of dG [PARTS, T, H, C]. Grid: (T, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    end = tl.load(row_end_pointer + tile * C + row)
    d_path = tl.zeros([C], tl.float32)
    for part in tl.static_range(PARTS):
        place = ((part * num_tiles + tile).to(tl.int64) * HEADS + head) * C + row
        d_path += tl.load(d_path_pointer + place)
    # The gate of a token is part of the path sums of its descendants.
    sees = visible_rows(row[:, None], row[None, :], end[None, :])
    d_g = tl.sum(tl.where(sees, d_path[:, None], 0.0), 0)
    tl.store(d_g_pointer + token.to(tl.int64) * HEADS + head, d_g, mask=token < num_tokens)
