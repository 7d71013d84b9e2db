"""What a tile writes, dt_j x_j, with the decays of its rows, and the gradients of both factors.

Legend: T tiles, C rows of a tile, H heads, V head size.
"""

import triton
import triton.language as tl

from tree_kernels.tree_gated_delta_rule.triton_kernels.prepare_kernels import store_decays
from tree_kernels.tree_gated_delta_rule.triton_kernels.tile import (
    load_matrix,
    load_rows,
    row_offsets,
    store_matrix,
    store_rows,
    token_offsets,
)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def write_kernel(
    v_pointer: tl.tensor,
    g_pointer: tl.tensor,
    beta_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    main_row_pointer: tl.tensor,
    path_pointer: tl.tensor,
    from_entry_pointer: tl.tensor,
    to_exit_pointer: tl.tensor,
    kept_pointer: tl.tensor,
    written_pointer: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Decays of tiles, float32, and the values they write [T, H, C, V]. Grid: (T, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    end = tl.load(row_end_pointer + tile * C + row)
    store_decays(
        g_pointer, main_row_pointer, path_pointer, from_entry_pointer, to_exit_pointer, kept_pointer, token, end, tile,
        head, num_tokens, num_tiles, HEADS, C,
    )  # fmt: skip
    step = tl.load(beta_pointer + token.to(tl.int64) * HEADS + head, mask=exists, other=0.0)
    value_rows, written_rows = token_offsets(token, head, HEADS, V), row_offsets(tile, head, HEADS, C, V)
    for block in tl.static_range(V // BV):
        v = load_rows(v_pointer, value_rows, exists, block * BV, BV).to(tl.float32)
        store_matrix(written_pointer, v * step[:, None], written_rows, block * BV, BV)


@triton.jit(do_not_specialize=["num_tokens"])
def write_gradients_kernel(
    v_pointer: tl.tensor,
    beta_pointer: tl.tensor,
    d_written_pointer: tl.tensor,
    token_pointer: tl.tensor,
    d_v_pointer: tl.tensor,
    d_beta_pointer: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Gradients of x [N, H, V] and dt [N, H] float32. Grid: (T, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(token_pointer + tile * C + tl.arange(0, C))
    exists = token < num_tokens
    at = token.to(tl.int64) * HEADS + head
    step = tl.load(beta_pointer + at, mask=exists, other=0.0)
    value_rows, written_rows = token_offsets(token, head, HEADS, V), row_offsets(tile, head, HEADS, C, V)
    d_step = tl.zeros([C], tl.float32)
    for block in tl.static_range(V // BV):
        d_written = load_matrix(d_written_pointer, written_rows, block * BV, BV).to(tl.float32)
        v = load_rows(v_pointer, value_rows, exists, block * BV, BV).to(tl.float32)
        d_step += tl.sum(d_written * v, 1)
        store_rows(d_v_pointer, d_written * step[:, None], value_rows, exists, block * BV, BV)
    tl.store(d_beta_pointer + at, d_step, mask=exists)
