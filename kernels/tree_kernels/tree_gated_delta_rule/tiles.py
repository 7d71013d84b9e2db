"""How a forest is cut into tiles of tokens that one dense product handles, each entered by a single state.

A tile holds at most C tokens, all of which hang, inside the tile, from one token before it: the entry. It may hold
several siblings, whole subtrees and branch points, so that segments of ten tokens do not each occupy a tile of 64.
Tiles are filled from the leaves upwards. Legend: N unique tokens, T tiles, C tokens of a tile, S segments, X exits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tree_kernels.layout import TreeLayout
from tree_kernels.parents import parents_of

START = -1
"""Entry of tiles at the roots of the forest: the initial state."""

Range = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TilePlan:
    """Tiles, ordered by depth in the tree of tiles: those of one depth need only the states that leave the last."""

    num_tokens: int
    """N."""
    token: np.ndarray
    """int64 [T, C], tokens of each tile in DFS order; N in the rows behind its last token."""
    tile_of_token: np.ndarray
    """int64 [N]."""
    row_of_token: np.ndarray
    """int64 [N], place in the tile."""
    depth_start: np.ndarray
    """int64 [depths + 1], first tile of each depth."""
    entry: np.ndarray
    """int64 [T], exit whose state enters the tile, START for the initial state."""
    exit_token: np.ndarray
    """int64 [X], tokens whose state leaves their tile, ordered by tile, then row; entries of tiles and states that the
    caller asked for."""
    wanted: np.ndarray
    """int64, exit of each token that the caller asked for."""

    @property
    def num_tiles(self) -> int:
        """Number T of tiles."""
        return len(self.token)


def tile_plan(layout: TreeLayout, *, tile_tokens: int, wanted: Sequence[int] = ()) -> TilePlan:
    """The tiles of a layout, built on the host at the first call and kept with it.

    Args:
        layout: the forest.
        tile_tokens: most tokens C of a tile.
        wanted: tokens whose states the caller reads.
    """
    key = ("delta_tiles", tile_tokens, tuple(wanted))
    return layout.metadata(key, lambda own: plan_tiles(parents_of(own), tile_tokens, tuple(wanted)))


def plan_tiles(parent: np.ndarray, tile_tokens: int, wanted: Sequence[int]) -> TilePlan:
    """Cut a forest into tiles.

    Args:
        parent: int32 [N], -1 at roots.
        tile_tokens: most tokens of a tile.
        wanted: tokens whose states the caller reads.
    """
    num_tokens = len(parent)
    closed, entries = _fill(parent, tile_tokens)
    # A tile is closed after those below it; the reverse order has parents first.
    ranges, entry_token = closed[::-1], np.array(entries[::-1], dtype=np.int64)
    tile_of_token, row_of_token = _places(ranges, num_tokens)
    entry_tile = np.where(entry_token >= 0, tile_of_token[entry_token], START) if num_tokens else entry_token
    depth = [0] * len(ranges)
    for tile, above in enumerate(entry_tile.tolist()):
        depth[tile] = depth[above] + 1 if above >= 0 else 0
    order = np.argsort(np.array(depth, dtype=np.int64), kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    tile_of_token = number[tile_of_token]
    entry_token = entry_token[order]
    width = int(row_of_token.max(initial=-1)) + 1
    token = np.full((len(order), width), num_tokens, dtype=np.int64)
    token[tile_of_token, row_of_token] = np.arange(num_tokens)
    exit_token = np.unique(np.concatenate([entry_token[entry_token >= 0], np.array(wanted, dtype=np.int64)]))
    exit_token = exit_token[np.lexsort((row_of_token[exit_token], tile_of_token[exit_token]))]
    exit_of_token = np.full(num_tokens + 1, START, dtype=np.int64)
    exit_of_token[exit_token] = np.arange(len(exit_token))
    depths = np.bincount(np.array(depth, dtype=np.int64)) if depth else np.zeros(0, dtype=np.int64)
    return TilePlan(
        num_tokens=num_tokens,
        token=token,
        tile_of_token=tile_of_token,
        row_of_token=row_of_token,
        depth_start=np.concatenate([[0], np.cumsum(depths)]),
        # The last element stands for token -1, the place before a root.
        entry=exit_of_token[entry_token],
        exit_token=exit_token,
        wanted=exit_of_token[np.array(wanted, dtype=np.int64)],
    )


def _segments(parent: np.ndarray) -> tuple[list[int], list[int]]:
    """First tokens of all maximal runs without a branch, then N; and the segment above each, -1 at roots."""
    num_tokens = len(parent)
    is_start = parent != np.arange(num_tokens) - 1
    children = np.bincount(parent[parent >= 0], minlength=num_tokens)
    # The first child of a branch point continues its run, yet starts a segment.
    is_start[1:] |= (children[:-1] > 1) & (parent[1:] == np.arange(num_tokens - 1))
    is_start[:1] = True
    starts = np.flatnonzero(is_start)
    segment = np.cumsum(is_start) - 1
    above = np.where(parent[starts] >= 0, segment[parent[starts]], -1)
    return [*starts.tolist(), num_tokens], above.tolist()


def _fill(parent: np.ndarray, most: int) -> tuple[list[list[Range]], list[int]]:
    """Token ranges and entry token of each tile, tiles below before those above.

    From the leaves upwards, tokens join what is open below them until the tile is full. Where several open pieces do
    not fit below a token, the largest are closed, which is the fewest cuts (Kundu and Misra 1977); what is closed at
    one token is packed, since it shares that token as entry.
    """
    starts, above = _segments(parent)
    tiles: list[list[Range]] = []
    entries: list[int] = []
    open_below: list[list[tuple[int, list[Range]]]] = [[] for _ in range(len(above) + 1)]

    def close(pieces: list[tuple[int, list[Range]]], entry: int) -> None:
        packed = _packed(pieces, most)
        tiles.extend(packed)
        entries.extend([entry] * len(packed))

    for segment in reversed(range(len(above))):
        start, stop = starts[segment], starts[segment + 1]
        size: int = 0
        ranges: list[Range] = []
        left_over = []
        for piece in sorted(open_below[segment], key=lambda piece: piece[0]):
            if size + piece[0] < most:
                size += piece[0]
                ranges += piece[1]
            else:
                left_over.append(piece)
        close(left_over, stop - 1)
        while True:
            joined = min(most - size, stop - start)
            stop -= joined
            size += joined
            ranges.append((stop, stop + joined))
            if stop == start:
                break
            close([(size, ranges)], stop - 1)
            size, ranges = 0, []
        open_below[segment] = []
        open_below[above[segment]].append((size, ranges))
    close(open_below[-1], START)
    return tiles, entries


def _packed(pieces: list[tuple[int, list[Range]]], most: int) -> list[list[Range]]:
    """Pieces with one entry in few tiles: best fit, largest first."""
    tiles: list[list[Range]] = []
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


def _places(tiles: list[list[Range]], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tile and row of every token; rows follow the order of the tokens."""
    counts = [len(ranges) for ranges in tiles]
    bounds = np.array([bound for ranges in tiles for bound in ranges], dtype=np.int64).reshape(-1, 2)
    order = np.argsort(bounds[:, 0])
    tile_of_token = np.repeat(np.repeat(np.arange(len(tiles)), counts)[order], (bounds[:, 1] - bounds[:, 0])[order])
    by_tile = np.argsort(tile_of_token, kind="stable")
    first = np.cumsum(np.bincount(tile_of_token, minlength=len(tiles))) - np.bincount(
        tile_of_token, minlength=len(tiles)
    )
    row_of_token = np.empty(num_tokens, dtype=np.int64)
    row_of_token[by_tile] = np.arange(num_tokens) - first[tile_of_token[by_tile]]
    return tile_of_token, row_of_token
