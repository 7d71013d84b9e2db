"""Functions that the kernels share: visibility, decay between rows, and reading a tile by rows or columns.

Path sums are stored as two float32 numbers, high and low, because differences of large float32 sums would be too
inaccurate. State sizes are powers of two, so columns need no mask.
Legend: C rows of a tile, D columns of a block, H value heads.
"""

import triton
import triton.language as tl


@triton.jit
def visible_rows(i: tl.tensor, j: tl.tensor, end_j: tl.tensor) -> tl.tensor:
    """True if row j is row i or an ancestor of row i; operands broadcast."""
    return (j <= i) & (i < end_j)


@triton.jit
def decay_between(
    visible: tl.tensor, high_i: tl.tensor, low_i: tl.tensor, high_j: tl.tensor, low_j: tl.tensor
) -> tl.tensor:
    """exp(G_i - G_j) if row i sees row j, else 0; operands broadcast."""
    difference = (high_i - high_j) + (low_i - low_j)
    return tl.exp(tl.where(visible, difference, float("-inf")))


@triton.jit
def load_path(
    path_pointer: tl.tensor,
    tile: tl.tensor,
    head: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Path sums of a tile's rows, high and low part."""
    offset = (tile.to(tl.int64) * HEADS + head) * C + tl.arange(0, C)
    low_pointer = path_pointer + num_tiles.to(tl.int64) * HEADS * C
    return tl.load(path_pointer + offset), tl.load(low_pointer + offset)


@triton.jit
def exit_decays(
    path_pointer: tl.tensor,
    row_end_pointer: tl.tensor,
    exit_row: tl.tensor,
    tile: tl.tensor,
    head: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    C: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Decay from each row [C], and from the entry, to the state after `exit_row`; all 0 if that is -1."""
    row = tl.arange(0, C)
    high, low = load_path(path_pointer, tile, head, num_tiles, HEADS, C)
    end = tl.load(row_end_pointer + tile * C + row)
    at = (tile.to(tl.int64) * HEADS + head) * C + tl.maximum(exit_row, 0)
    exit_high = tl.load(path_pointer + at)
    exit_low = tl.load(path_pointer + num_tiles.to(tl.int64) * HEADS * C + at)
    weight = decay_between(visible_rows(exit_row, row, end), exit_high, exit_low, high, low)
    return weight, tl.where(exit_row >= 0, tl.exp(exit_high + exit_low), 0.0)


@triton.jit
def token_offsets(token: tl.tensor, head: tl.tensor, HEADS: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Offset of each token's first column in [N, HEADS, SIZE]."""
    return (token.to(tl.int64) * HEADS + head) * SIZE


@triton.jit
def load_rows(pointer: tl.tensor, offset_C: tl.tensor, exists_C: tl.tensor, first: int, D: tl.constexpr) -> tl.tensor:
    """D columns from `first` on, as [C, D]; rows that do not exist are zeros."""
    column = first + tl.arange(0, D)
    return tl.load(pointer + offset_C[:, None] + column[None, :], mask=exists_C[:, None], other=0.0)


@triton.jit
def load_columns(
    pointer: tl.tensor, offset_C: tl.tensor, exists_C: tl.tensor, first: int, D: tl.constexpr
) -> tl.tensor:
    """`load_rows` as [D, C], read in that shape because a transposed register operand is miscompiled on Hopper."""
    column = first + tl.arange(0, D)
    return tl.load(pointer + offset_C[None, :] + column[:, None], mask=exists_C[None, :], other=0.0)


@triton.jit
def store_rows(
    pointer: tl.tensor, value: tl.tensor, offset_C: tl.tensor, exists_C: tl.tensor, first: int, D: tl.constexpr
) -> None:
    """Write the rows of [C, D] that exist."""
    column = first + tl.arange(0, D)
    place = pointer + offset_C[:, None] + column[None, :]
    tl.store(place, value.to(pointer.dtype.element_ty), mask=exists_C[:, None])


@triton.jit
def row_offsets(
    index: tl.tensor, head: tl.tensor, HEADS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr
) -> tl.tensor:
    """Offset of the first column of each row of one matrix in [*, HEADS, ROWS, SIZE]."""
    return (index.to(tl.int64) * HEADS + head) * (ROWS * SIZE) + tl.arange(0, ROWS) * SIZE


@triton.jit
def load_matrix(pointer: tl.tensor, offset_R: tl.tensor, first: int, D: tl.constexpr) -> tl.tensor:
    """D columns of all rows of a matrix, as [R, D]."""
    return tl.load(pointer + offset_R[:, None] + (first + tl.arange(0, D))[None, :])


@triton.jit
def load_matrix_columns(pointer: tl.tensor, offset_R: tl.tensor, first: int, D: tl.constexpr) -> tl.tensor:
    """`load_matrix` as [D, R]."""
    return tl.load(pointer + offset_R[None, :] + (first + tl.arange(0, D))[:, None])


@triton.jit
def store_matrix(pointer: tl.tensor, value: tl.tensor, offset_R: tl.tensor, first: int, D: tl.constexpr) -> None:
    """Write D columns of all rows of a matrix."""
    place = pointer + offset_R[:, None] + (first + tl.arange(0, D))[None, :]
    tl.store(place, value.to(pointer.dtype.element_ty))


@triton.jit
def load_state(
    pointer: tl.tensor,
    index: tl.tensor,
    head: tl.tensor,
    first_row: int,
    first_column: int,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Block [BK, BV] of one state in [*, HEADS, K, V]; [BV, BK] if TRANSPOSED."""
    start = (index.to(tl.int64) * HEADS + head) * (K * V) + first_row * V + first_column
    if TRANSPOSED:
        return tl.load(pointer + start + tl.arange(0, BK)[None, :] * V + tl.arange(0, BV)[:, None])
    else:
        return tl.load(pointer + start + tl.arange(0, BK)[:, None] * V + tl.arange(0, BV)[None, :])


@triton.jit
def store_path_part(
    pointer: tl.tensor,
    value: tl.tensor,
    part: int,
    tile: tl.tensor,
    head: tl.tensor,
    num_tiles: tl.tensor,
    HEADS: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Write one part [C] of a tile's gradient of path sums into [parts, T, H, C]."""
    place = ((part * num_tiles + tile).to(tl.int64) * HEADS + head) * C + tl.arange(0, C)
    tl.store(pointer + place, value)
