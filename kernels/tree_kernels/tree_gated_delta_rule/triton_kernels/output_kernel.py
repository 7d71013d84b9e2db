"""Outputs of all tiles in parallel from their entry states.

O = scale (exp(G) Q S + (D * Q K^T) U). Legend: T tiles, C rows of a tile, H value heads, K and V state sizes.
"""

import triton
import triton.language as tl

from tree_kernels.tree_gated_delta_rule.triton_kernels.tile import (
    decay_between,
    load_matrix,
    load_path,
    load_rows,
    load_state,
    row_offsets,
    store_rows,
    token_offsets,
    visible_rows,
)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def output_kernel(
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    written_pointer: tl.tensor,
    entry_pointer: tl.tensor,
    path_pointer: tl.tensor,
    token_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    out_pointer: tl.tensor,
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
    """Outputs [N, H, V]. Grid: (T, H)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C)
    token = tl.load(token_pointer + tile * C + row)
    exists = token < num_tokens
    key_rows = token_offsets(token, head // GROUP, HEADS // GROUP, K)
    scores = tl.zeros([C, C], tl.float32)
    for block in tl.static_range(K // BK):
        q = load_rows(q_pointer, key_rows, exists, block * BK, BK)
        k = load_rows(k_pointer, key_rows, exists, block * BK, BK)
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
    end = tl.load(row_end_pointer + tile * C + row)
    sees = visible_rows(row[:, None], row[None, :], end[None, :])
    decay = decay_between(sees, high[:, None], low[:, None], high[None, :], low[None, :])
    weights = (scores * decay).to(k_pointer.dtype.element_ty)
    entry_decay = tl.exp(high + low)
    out_rows = token_offsets(token, head, HEADS, V)
    for block in tl.static_range(V // BV):
        out = tl.zeros([C, BV], tl.float32)
        for part in tl.static_range(K // BK):
            q = load_rows(q_pointer, key_rows, exists, part * BK, BK)
            entry = load_state(entry_pointer, tile, head, part * BK, block * BV, HEADS, K, V, BK, BV, False)
            out = tl.dot(q, entry, out, input_precision="ieee")
        written = load_matrix(written_pointer, row_offsets(tile, head, HEADS, C, V), block * BV, BV)
        out = tl.dot(weights, written, out * entry_decay[:, None], input_precision="ieee")
        store_rows(out_pointer, out * scale, out_rows, exists, block * BV, BV)
