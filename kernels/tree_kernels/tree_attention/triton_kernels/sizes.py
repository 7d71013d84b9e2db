"""Supported head sizes and tile sizes of the Triton kernels. This file does not import Triton."""

from dataclasses import dataclass, replace

import torch

from tree_kernels import triton_support
from tree_kernels.triton_support import HOPPER

MAX_HEAD_SIZE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Tile shape and launch options of one kernel."""

    rows: int
    """Query rows."""
    keys: int
    warps: int
    """Warps per program."""
    stages: int
    """Depth of the load pipeline."""
    packed: bool = False
    """Rows are pairs of token and query head, so that all query heads of a key head share each read of the keys."""
    in_registers: bool = False
    """Operands that stay for the whole program are kept in registers instead of shared memory."""
    precision: str = "ieee"
    """Precision of float32 products; no effect on half precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiles of all kernels."""

    forward: Tile
    query_gradient: Tile
    key_gradients: tuple[Tile, ...]
    """One tile for keys and values together, or one for the keys and one for the values."""


def triton_unavailable_reason(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why the Triton kernels cannot run at this head size, or None if they can."""
    reason = triton_support.triton_unavailable_reason(device, dtype)
    if reason is None and head_size > MAX_HEAD_SIZE:
        return f"the Triton kernels need a head size <= {MAX_HEAD_SIZE}, received {head_size}"
    return reason


def padded_size(head_size: int) -> int:
    """Head size of the tiles: a power of two of at least 16."""
    return max(16, 1 << (head_size - 1).bit_length())


def measured_on(device: torch.device) -> bool:
    """True on Hopper, where the tiles were measured; elsewhere they are only known to fit."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == HOPPER


def tiles_for(head_size: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Tiles by head size, dtype and architecture; for Hopper the fastest of a sweep on an H200."""
    size = padded_size(head_size)
    if dtype == torch.float32:
        return _float32_tiles(size, device)
    if not measured_on(device):
        return _portable_tiles(size)
    if size <= 64:
        tile = Tile(rows=64, keys=64, warps=4, stages=2)
        return Tiles(forward=replace(tile, packed=True), query_gradient=tile, key_gradients=(replace(tile, rows=128),))
    if size == 128:
        tile = Tile(rows=64, keys=64, warps=4, stages=2)
        # Forward tiles of 128 x 128 are 2 to 10 % faster on trees of large segments and 20 % slower on small ones.
        return Tiles(forward=replace(tile, stages=5, packed=True), query_gradient=tile, key_gradients=(tile,))
    return Tiles(
        forward=Tile(rows=128, keys=64, warps=8, stages=2, packed=True),
        query_gradient=Tile(rows=128, keys=32, warps=8, stages=2, packed=True),
        # Two accumulators of this size do not fit into the registers, so keys and values have separate kernels.
        key_gradients=(Tile(rows=64, keys=64, warps=4, stages=2), Tile(rows=64, keys=128, warps=8, stages=2)),
    )


def _portable_tiles(size: int) -> Tiles:
    """Tiles with at most 75 KiB of shared memory on every architecture and few register spills on Ampere and Ada."""
    if size <= 128:
        tile = Tile(rows=64, keys=32, warps=8, stages=2)
        return Tiles(forward=replace(tile, packed=True), query_gradient=tile, key_gradients=(tile,))
    tile = Tile(rows=32, keys=32, warps=8, stages=1)
    return Tiles(forward=replace(tile, packed=True), query_gradient=tile, key_gradients=(tile, tile))


def _float32_tiles(size: int, device: torch.device) -> Tiles:
    """Each product is three tf32 products: as accurate as float32 and 7 times as fast (both measured)."""
    small = Tile(rows=32, keys=32, warps=4, stages=1, precision="tf32x3")
    if size <= 64:
        tile = replace(small, rows=64)
        return Tiles(forward=replace(tile, keys=64, packed=True), query_gradient=tile, key_gradients=(tile,))
    if size == 128:
        return Tiles(forward=replace(small, packed=True), query_gradient=small, key_gradients=(small,))
    if not measured_on(device):
        tiny = replace(small, rows=16, keys=16)
        return Tiles(forward=replace(tiny, packed=True), query_gradient=tiny, key_gradients=(tiny,))
    wide = replace(small, warps=8)
    return Tiles(forward=replace(wide, rows=64, packed=True), query_gradient=wide, key_gradients=(wide,))
