"""Cuts a forest into tiles of at most C tokens, each processed by dense products and entered by a single state.

All tokens of a tile descend, within the tile, from one token before it: the entry. A tile may hold several siblings,
whole subtrees and branch points, so that segments of ten tokens do not each occupy a tile of 64. Tiles are filled from
the leaves upwards. A range is a run of consecutive tokens of one segment in one tile.
Legend: N unique tokens, R ranges, T tiles, C tokens of a tile, X exits.
"""

from dataclasses import dataclass

import numpy as np

from tree_kernels.parents import LayoutSegments, segments_of
from tree_kernels.tree_layout import TreeLayout, kept

START = -1
"""Entry of tiles at the roots: the initial state."""

Piece = tuple[int, list[int]]
"""Number of tokens, and the ranges that hold them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TilePlan:
    """Tiles sorted by depth in the tree of tiles; a tile's entry state leaves a tile of the previous depth."""

    token: np.ndarray
    """int32 [T, C], tokens of each tile in DFS order, padded with N."""
    tile_of_token: np.ndarray
    """int32 [N], tile of each token."""
    row_of_token: np.ndarray
    """int32 [N], row in the tile of each token."""
    row_end: np.ndarray
    """int32 [T, C], first row of the tile past the subtree of each row: row i sees row j iff j <= i < row_end[j]; 0 in
    padding rows."""
    depth_start: np.ndarray
    """int64 [depths + 1], first tile of each depth."""
    entry: np.ndarray
    """int64 [T], exit whose state enters the tile, START for the initial state."""
    exit_token: np.ndarray
    """int64 [X], tokens whose state leaves their tile, sorted by tile, then row: entries of tiles and wanted tokens."""
    wanted: np.ndarray
    """int64, exit of each token whose state the caller requested."""


@kept
def tile_plan(layout: TreeLayout, tile_tokens: int, wanted: tuple[int, ...]) -> TilePlan:
    """Cut a forest into tiles of at most `tile_tokens`, on the host; cached with the layout.

    `wanted` are tokens whose states the caller requests.
    """
    segments = segments_of(layout)
    start_R, tile_R, entry_token = _fill(segments, tile_tokens)
    depth = _depths(start_R, tile_R, entry_token)
    order = np.argsort(depth, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    tile_R, entry_token = number[tile_R], entry_token[order]
    token, row_end, tile_of_token, row_of_token = _places(segments, start_R, tile_R, len(order))
    wanted_token = np.array(wanted, dtype=np.int64)
    exit_token = np.unique(np.concatenate([entry_token[entry_token >= 0], wanted_token]))
    exit_token = exit_token[np.lexsort((row_of_token[exit_token], tile_of_token[exit_token]))]
    exit_of_token = np.full(layout.num_tokens + 1, START, dtype=np.int64)
    exit_of_token[exit_token] = np.arange(len(exit_token))
    return TilePlan(
        token=token,
        tile_of_token=tile_of_token,
        row_of_token=row_of_token,
        row_end=row_end,
        depth_start=np.append(0, np.cumsum(np.bincount(depth))),
        # The entry token of tiles at roots is -1, which indexes the last element: START.
        entry=exit_of_token[entry_token],
        exit_token=exit_token,
        wanted=exit_of_token[wanted_token],
    )


def _fill(segments: LayoutSegments, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First token [R] and tile [R] of each range in DFS order, entry token [T] of each tile; parent tiles come first.

    From the leaves upwards, tokens join the open pieces below them until the tile is full. If the pieces below a token
    do not fit together, the largest are closed, which gives the fewest cuts (Kundu and Misra 1977). Pieces that are
    closed at one token are packed into tiles together, because they share that token as entry.
    """
    starts, above = segments.start.tolist(), segments.above.tolist()
    first: list[int] = []
    tile: list[int] = []
    entries: list[int] = []
    open_below: list[list[Piece]] = [[] for _ in range(len(above) + 1)]

    def close(pieces: list[Piece], entry: int) -> None:
        """Make tiles of pieces that share an entry token."""
        for ranges in _packed(pieces, most):
            for one in ranges:
                tile[one] = len(entries)
            entries.append(entry)

    for segment in range(len(above) - 1, -1, -1):
        start, stop = starts[segment], starts[segment + 1]
        size, ranges, left_over = _joined(open_below[segment], most)
        if left_over:
            close(left_over, stop - 1)
        joined = min(most - size, stop - start)
        stop -= joined
        ranges.append(len(first))
        first.append(stop)
        tile.append(START)
        size += joined
        if stop > start:
            close([(size, ranges)], stop - 1)
            # The tiles in between are full and hold only this segment.
            if stop - start > most:
                between = range(stop - most, start, -most)
                first.extend(between)
                tile.extend(range(len(entries), len(entries) + len(between)))
                entries.extend(range(stop - most - 1, start - 1, -most))
                stop = between[-1]
            size, ranges = stop - start, [len(first)]
            first.append(start)
            tile.append(START)
        open_below[above[segment]].append((size, ranges))
    close(open_below[-1], START)
    # Tiles are closed after their descendants, so the reverse order has parents first.
    first_R = np.array(first, dtype=np.int64)
    order = np.argsort(first_R)
    tile_R = len(entries) - 1 - np.array(tile, dtype=np.int64)
    return first_R[order], tile_R[order], np.array(entries[::-1], dtype=np.int64)


def _joined(pieces: list[Piece], most: int) -> tuple[int, list[int], list[Piece]]:
    """Size and ranges of the pieces that stay open, smallest first, with room for one more token; and the others."""
    size: int = 0
    ranges: list[int] = []
    left_over: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece[0]):
        if size + piece[0] < most:
            size += piece[0]
            ranges += piece[1]
        else:
            left_over.append(piece)
    return size, ranges, left_over


def _packed(pieces: list[Piece], most: int) -> list[list[int]]:
    """Pack pieces with the same entry into few tiles: best fit, largest first."""
    if len(pieces) < 2:
        return [ranges for _, ranges in pieces]
    tiles: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(most + 1)]
    for size, ranges in sorted(pieces, key=lambda piece: -piece[0]):
        room = next((free for free in range(size, most + 1) if with_room[free]), None)
        if room is None:
            tiles.append(list(ranges))
            with_room[most - size].append(len(tiles) - 1)
        else:
            tile = with_room[room].pop()
            tiles[tile] += ranges
            with_room[room - size].append(tile)
    return tiles


def _depths(start_R: np.ndarray, tile_R: np.ndarray, entry_token: np.ndarray) -> np.ndarray:
    """int64 [T], number of ancestors of each tile; parent tiles come first."""
    if not len(entry_token):
        return entry_token
    above = np.where(entry_token >= 0, tile_R[np.searchsorted(start_R, entry_token, side="right") - 1], START)
    depth: list[int] = []
    for tile in above.tolist():
        depth.append(depth[tile] + 1 if tile >= 0 else 0)
    return np.array(depth, dtype=np.int64)


def _places(
    segments: LayoutSegments, start_R: np.ndarray, tile_R: np.ndarray, num_tiles: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`token`, `row_end`, `tile_of_token` and `row_of_token` of a `TilePlan`."""
    num_tokens = int(segments.start[-1])
    tokens_R = np.diff(start_R, append=num_tokens)
    by_tile = np.argsort(tile_R, kind="stable")
    tile, start, tokens = tile_R[by_tile], start_R[by_tile], tokens_R[by_tile]
    # Offsets of each range, and of each tile, if all tiles are concatenated.
    place = np.append(0, np.cumsum(tokens))
    first_of_tile = place[np.searchsorted(tile, np.arange(num_tiles + 1))]
    row = place[:-1] - first_of_tile[tile]
    row_R = np.empty_like(row)
    row_R[by_tile] = row
    # No range crosses the end of a subtree, so the first token past a subtree starts a range.
    end = segments.start[segments.past[np.searchsorted(segments.start, start, side="right") - 1]]
    later = np.searchsorted(tile * (num_tokens + 1) + start, tile * (num_tokens + 1) + end)
    held = np.arange(int(np.diff(first_of_tile).max(initial=0))) < np.diff(first_of_tile)[:, None]
    token, row_end = np.full(held.shape, num_tokens, dtype=np.int32), np.zeros(held.shape, dtype=np.int32)
    token[held] = _counted(start, tokens)
    row_end[held] = np.repeat((place[later] - first_of_tile[tile]).astype(np.int32), tokens)
    return token, row_end, np.repeat(tile_R.astype(np.int32), tokens_R), _counted(row_R, tokens_R)


def _counted(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int32, concatenated runs that count upwards from each first value."""
    shift = first - (np.cumsum(lengths) - lengths)
    values = np.repeat(shift.astype(np.int32), lengths)
    values += np.arange(len(values), dtype=np.int32)
    return values
