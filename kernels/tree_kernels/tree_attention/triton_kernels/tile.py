"""Functions that the forward and backward kernels share: reading tiles, scores, and the mask of a pair of blocks.

Scores are in units of log 2, because the hardware computes powers of 2: exp(x) = 2 ** (x * LOG2_E).
Legend: R query rows of a tile (tokens, or pairs of token and head), C keys of a tile, D head size padded to a power of
two.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_block(descriptor: tl.tensor, first_row: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Rows first_row .. of one head [rows, D] of a tensor [rows, heads, D]; zeros outside of it."""
    block = descriptor.load([first_row, head, 0])
    return block.reshape(block.shape[0], block.shape[2])


@triton.jit
def load_rows(
    pointer: tl.tensor,
    offset_R: tl.tensor,
    exists_R: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
) -> tl.tensor:
    """Rows [R, D] at any offsets; rows and columns that do not exist are zeros.

    For a product Triton puts operands that come directly from memory into shared memory. IN_REGISTERS prevents that.
    """
    column_D = tl.arange(0, PADDED_SIZE)
    exists_RD = exists_R[:, None] & (column_D < HEAD_SIZE)[None, :]
    rows_RD = tl.load(pointer + offset_R[:, None] + column_D[None, :], mask=exists_RD, other=0.0)
    if IN_REGISTERS:
        return from_bits(to_bits(rows_RD), rows_RD)
    return rows_RD


@triton.jit
def store_rows(
    pointer: tl.tensor,
    offset_R: tl.tensor,
    value_RD: tl.tensor,
    exists_R: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
) -> None:
    """Write the rows and columns that exist, in the pointer's dtype."""
    column_D = tl.arange(0, PADDED_SIZE)
    exists_RD = exists_R[:, None] & (column_D < HEAD_SIZE)[None, :]
    tl.store(pointer + offset_R[:, None] + column_D[None, :], value_RD.to(pointer.dtype.element_ty), mask=exists_RD)


@triton.jit
def to_bits(x: tl.tensor) -> tl.tensor:
    """The bits of `x` as integers of its width.

    A loop carries integers to its next iteration in registers. Floats that are a product's operand would go through
    shared memory, and the product would wait for them.
    """
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(tl.int16, bitcast=True)


@triton.jit
def from_bits(bits: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Inverse of `to_bits`, in the dtype of `like`."""
    return bits.to(like.dtype, bitcast=True)


@triton.jit
def tanh_of_half_log2(x: tl.tensor) -> tl.tensor:
    """tanh(y), given x = 2 y LOG2_E; correct also if the power underflows to 0 or overflows to infinity."""
    return 1.0 - 2.0 / (tl.math.exp2(x) + 1.0)


@triton.jit
def softmax_weights(
    raw: tl.tensor, lse_log2: tl.tensor, scale_log2: tl.tensor, cap_log2: tl.tensor, CAPPED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Softmax weights of raw products, and the slope of the cap (meaningless without a cap)."""
    if CAPPED:
        tanh = tanh_of_half_log2(raw * scale_log2)
        slope = 1.0 - tanh * tanh
        weight = tl.math.exp2(tanh * cap_log2 - lse_log2)
    else:
        slope = raw
        weight = tl.math.exp2(raw * scale_log2 - lse_log2)
    return weight, slope


@triton.jit
def pairs_visible(
    query: tl.tensor,
    key: tl.tensor,
    key_end: tl.tensor,
    query_depth: tl.tensor,
    key_depth: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
) -> tl.tensor:
    """Which pairs are visible; query and key arguments are [R, 1] and [1, C], or the reverse."""
    visible = (key <= query) & (query < key_end)
    if WINDOWED:
        visible = visible & (query_depth - key_depth < window)
    return visible


@triton.jit
def key_block_visible(
    query_R: tl.tensor,
    query_depth_R: tl.tensor,
    key_end_pointer: tl.tensor,
    key_depth_pointer: tl.tensor,
    first_key: tl.tensor,
    window: tl.tensor,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tl.tensor:
    """Which pairs [R, C] of a tile's queries and the keys of one block are visible."""
    key_C = first_key + tl.arange(0, KEYS)
    key_depth_C = key_C
    if WINDOWED:
        key_depth_C = tl.load(key_depth_pointer + key_C)
    return pairs_visible(
        query_R[:, None], key_C[None, :], tl.load(key_end_pointer + key_C)[None, :], query_depth_R[:, None],
        key_depth_C[None, :], window, WINDOWED,
    )  # fmt: skip


@triton.jit
def row_token_and_head(
    tile: tl.tensor, head: tl.tensor, ROWS: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Token, query head and validity of each row of a tile; with PACK > 1 the tile has PACK query heads per token.

    If PACK does not divide ROWS, the last rows are unused.
    """
    row = tl.arange(0, ROWS)
    return tile * TOKENS + row // PACK, head * PACK + row % PACK, row < TOKENS * PACK
