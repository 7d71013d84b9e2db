"""For all tiles in parallel: path sums and decays of gates, the inverse of I + L, its products with keys and values.

L_ij = beta_i exp(G_i - G_j) k_i.k_j for strict ancestors j of i. The inverse is computed by forward substitution,
because a series in powers of L would cancel if keys repeat. Legend: C rows of a tile, R rows of a block, H value heads,
K and V state sizes.
"""

import triton
import triton.language as tl

from tree_kernels.tree_gated_delta_rule.triton_kernels.tile import (
    decay_between,
    load_matrix,
    load_path,
    load_rows,
    row_offsets,
    store_matrix,
    token_offsets,
    visible_rows,
)


@triton.jit
def store_decays(
    g_pointer: tl.tensor,
    main_row_pointer: tl.tensor,
    path_pointer: tl.tensor,
    from_entry_pointer: tl.tensor,
    to_exit_pointer: tl.tensor,
    kept_pointer: tl.tensor,
    token: tl.tensor,
    end: tl.tensor,
    tile: tl.tensor,
    head: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Write a tile's decays, float32; return its path sums, high and low part."""
    row = tl.arange(0, C)
    g = tl.load(g_pointer + token.to(tl.int64) * HEADS + head, mask=token < num_tokens, other=0.0).to(tl.float64)
    sees = visible_rows(row[:, None], row[None, :], end[None, :])
    path = tl.sum(tl.where(sees, g[None, :], 0.0), 1)
    high = path.to(tl.float32)
    low = (path - high.to(tl.float64)).to(tl.float32)
    of_tile = tile.to(tl.int64) * HEADS + head
    place = of_tile * C + row
    tl.store(path_pointer + place, high)
    tl.store(path_pointer + num_tiles.to(tl.int64) * HEADS * C + place, low)
    tl.store(from_entry_pointer + place, tl.exp(high + low))
    # Precomputed, because the walks go from tile to tile and would wait for these lookups.
    main_row = tl.load(main_row_pointer + tile)
    exit_high = tl.sum(tl.where(row == main_row, high, 0.0), 0)
    exit_low = tl.sum(tl.where(row == main_row, low, 0.0), 0)
    goes_on = visible_rows(main_row, row, end)
    tl.store(to_exit_pointer + place, decay_between(goes_on, exit_high, exit_low, high, low))
    tl.store(kept_pointer + of_tile, tl.where(main_row >= 0, tl.exp(exit_high + exit_low), 0.0))
    return high, low


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def prepare_kernel(
    k_pointer: tl.tensor,
    g_pointer: tl.tensor,
    beta_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    main_row_pointer: tl.tensor,
    path_pointer: tl.tensor,
    from_entry_pointer: tl.tensor,
    to_exit_pointer: tl.tensor,
    kept_pointer: tl.tensor,
    inverse_pointer: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """Decays of tiles, float32, and inverses [T, H, C, C]. Grid: (T, H).

    Without R, forward substitution is row by row in float32. With R, for bfloat16, the diagonal blocks of R rows are
    solved in parallel, row by row in float32, and then joined block row by block row with tf32 products, whose rounding
    is finer than that of the stored inverse.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    end = tl.load(row_end_pointer + tile * C + row)
    beta = tl.load(beta_pointer + token.to(tl.int64) * HEADS + head, mask=exists, other=0.0).to(tl.float32)
    sees = visible_rows(row[:, None], row[None, :], end[None, :])
    high, low = store_decays(
        g_pointer, main_row_pointer, path_pointer, from_entry_pointer, to_exit_pointer, kept_pointer, token, end, tile,
        head, num_tokens, num_tiles, HEADS, C,
    )  # fmt: skip

    key_rows = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    overlap = tl.zeros([C, C], tl.float32)
    for block in tl.static_range(K // BK):
        k = load_rows(k_pointer, key_rows, exists, block * BK, BK)
        overlap = tl.dot(k, tl.trans(k), overlap, input_precision="ieee")
    if R is None:
        # Transposed (rows j, columns i), so that a sum along the columns gives the coefficients of one row.
        seen = visible_rows(row[None, :], row[:, None], end[:, None]) & (row[:, None] < row[None, :])
        decay = decay_between(seen, high[None, :], low[None, :], high[:, None], low[:, None])
        lower_ji = overlap * decay * beta[None, :]
        inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
        for i in range(1, C):
            coefficient_j = tl.sum(tl.where(row[None, :] == i, lower_ji, 0.0), 1)
            combined = tl.sum(coefficient_j[:, None] * inverse, 0)
            inverse = tl.where(row[:, None] == i, inverse - combined[None, :], inverse)
    else:
        strictly = sees & (row[None, :] < row[:, None])
        decay = decay_between(strictly, high[:, None], low[:, None], high[None, :], low[None, :])
        lower = overlap * decay * beta[:, None]

        BLOCKS: tl.constexpr = C // R
        block_of = row // R
        outside = tl.where(block_of[:, None] == block_of[None, :], 0.0, lower)
        number, small = tl.arange(0, BLOCKS), tl.arange(0, R)
        # The blocks on the diagonal of [block, row, block, column].
        same = number[:, None, None, None] == number[None, None, :, None]
        diagonal = tl.sum(tl.where(same, tl.reshape(lower, [BLOCKS, R, BLOCKS, R]), 0.0), 2)
        unit = tl.where(small[:, None] == small[None, :], 1.0, 0.0)
        solved = tl.zeros([BLOCKS, R, R], tl.float32) + unit[None, :, :]
        for i in range(1, R):
            coefficient = tl.sum(tl.where(small[None, :, None] == i, diagonal, 0.0), 1)
            combined = tl.sum(coefficient[:, :, None] * solved, 1)
            solved = tl.where(small[None, :, None] == i, solved - combined[:, None, :], solved)
        of_blocks = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), [C, C])
        inverse = of_blocks
        if BLOCKS > 1:
            through = tl.dot(of_blocks, outside, input_precision="tf32")
            for block in tl.static_range(1, BLOCKS):
                product = tl.dot(through, inverse, input_precision="tf32")
                inverse = tl.where(block_of[:, None] == block, of_blocks - product, inverse)
    store_matrix(inverse_pointer, inverse, row_offsets(tile, head, HEADS, C, C), 0, C)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def products_kernel(
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    beta_pointer: tl.tensor,
    token_pointer: tl.tensor,
    path_pointer: tl.tensor,
    inverse_pointer: tl.tensor,
    reads_pointer: tl.tensor,
    own_pointer: tl.tensor,
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
    """W = inverse (beta exp(G) K), [T, H, C, K], and inverse (beta V), [T, H, C, V]. Grid: (T, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    beta = tl.load(beta_pointer + token.to(tl.int64) * HEADS + head, mask=exists, other=0.0).to(tl.float32)
    high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
    factor = beta * tl.exp(high + low)
    inverse = load_matrix(inverse_pointer, row_offsets(tile, head, HEADS, C, C), 0, C)
    k_offset = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    reads_offset = row_offsets(tile, head, HEADS, C, K)
    for block in tl.static_range(K // BK):
        k = load_rows(k_pointer, k_offset, exists, block * BK, BK)
        scaled = (k.to(tl.float32) * factor[:, None]).to(k.dtype)
        reads = tl.dot(inverse, scaled, input_precision="ieee")
        store_matrix(reads_pointer, reads, reads_offset, block * BK, BK)
    v_offset = token_offsets(token, head, HEADS, V)
    own_offset = row_offsets(tile, head, HEADS, C, V)
    for block in tl.static_range(V // BV):
        v = load_rows(v_pointer, v_offset, exists, block * BV, BV)
        scaled = (v.to(tl.float32) * beta[:, None]).to(v.dtype)
        own = tl.dot(inverse, scaled, input_precision="ieee")
        store_matrix(own_pointer, own, own_offset, block * BV, BV)
