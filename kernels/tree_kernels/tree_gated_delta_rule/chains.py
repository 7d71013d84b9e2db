"""Heavy chains of tiles: one program walks a chain with the state in registers, light chains start from stored states.

From each tile the chain continues into the tile below it with most tiles in its subtree; every other tile below starts
a chain of the next level, so there are at most log2(T) + 1 levels. A state is stored in float32 where a light chain
starts from it, where the caller asked for it, or where several states leave a tile.
Legend: N unique tokens, T tiles, C tokens of a tile, L chains, X side exits, S slots of stored states.
"""

from dataclasses import dataclass

import numpy as np

from tree_kernels.tree_gated_delta_rule.tiles import START, TilePlan

NONE = -1
INITIAL_SLOT = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainPlan:
    """Launch order of tiles; tiles are renumbered so that a chain, and a level, is one range. All arrays int32."""

    token: np.ndarray
    """[T, C], tokens of each tile in DFS order; N behind its last token"""
    row_end: np.ndarray
    """[T, C], first row of the tile past the subtree of each row: row i sees row j iff j <= i < row_end[j]"""
    main_row: np.ndarray
    """[T], row after which the chain continues; NONE in its last tile"""
    entry_slot: np.ndarray
    """[T], slot that holds the state that enters the tile; NONE if no one reads it there"""
    stores_entry: np.ndarray
    """[T], 1 where the walk must write that slot; 0 where it is there before or not needed"""
    chain_start: np.ndarray
    """[L + 1], first tile of each chain"""
    chain_slot: np.ndarray
    """[L], slot that holds the state from which the chain starts"""
    level_start: np.ndarray
    """[levels + 1], first chain of each level"""
    side_start: np.ndarray
    """[T + 1], first side exit of each tile: states that leave it besides the chain's own"""
    side_row: np.ndarray
    """[X], row after which the state leaves"""
    side_slot: np.ndarray
    """[X], slot that receives it"""
    source_start: np.ndarray
    """[S + 1], first gradient that flows into each slot's state from outside its chain"""
    source: np.ndarray
    """[...], chain that starts from the slot, or L + place among the wanted states"""
    wanted_slot: np.ndarray
    """[wanted], slot of each state that the caller asked for"""

    @property
    def num_tiles(self) -> int:
        """Number T of tiles."""
        return len(self.main_row)

    @property
    def num_slots(self) -> int:
        """Number S of slots, the initial state's included."""
        return len(self.source_start) - 1


def plan_chains(tiles: TilePlan) -> ChainPlan:
    """Order tiles by level and chain.

    Args:
        tiles: from `plan_tiles`.
    """
    # The last element stands for no exit: START and NONE point there.
    tile_of_exit = np.append(tiles.tile_of_token[tiles.exit_token], NONE)
    row_of_exit = np.append(tiles.row_of_token[tiles.exit_token], NONE)
    above = tile_of_exit[tiles.entry]
    heavy = _heavy_children(above)
    chain_of_tile, level_of_chain = _chains(above, heavy)
    order = np.argsort(chain_of_tile, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    chain_start = np.searchsorted(chain_of_tile[order], np.arange(len(level_of_chain) + 1))
    first_tile = order[chain_start[:-1]]
    slot_of_exit, side_exits = _slots(tiles, heavy, first_tile)
    side_tile = number[tile_of_exit[side_exits]]
    by_tile = np.argsort(side_tile, kind="stable")
    side_exit = side_exits[by_tile]
    is_first = np.zeros(len(order), dtype=bool)
    is_first[chain_start[:-1]] = True
    entry_slot = slot_of_exit[tiles.entry[order]]
    chain_slot = slot_of_exit[tiles.entry[first_tile]]
    wanted_slot = slot_of_exit[tiles.wanted]
    # Gradients that flow into a state: of light chains, then of wanted states.
    reads = np.concatenate([chain_slot, wanted_slot])
    source = np.argsort(reads, kind="stable")

    def int32(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=np.int32)

    return ChainPlan(
        token=int32(tiles.token[order]),
        row_end=int32(tiles.row_end[order]),
        main_row=int32(row_of_exit[np.append(tiles.entry, NONE)[heavy[order]]]),
        entry_slot=int32(entry_slot),
        stores_entry=int32((entry_slot != NONE) & ~is_first),
        chain_start=int32(chain_start),
        chain_slot=int32(chain_slot),
        level_start=int32(np.append(0, np.cumsum(np.bincount(level_of_chain)))),
        side_start=int32(np.searchsorted(side_tile[by_tile], np.arange(len(order) + 1))),
        side_row=int32(row_of_exit[side_exit]),
        side_slot=int32(slot_of_exit[side_exit]),
        source_start=int32(np.searchsorted(reads[source], np.arange(slot_of_exit.max() + 2))),
        source=int32(source),
        wanted_slot=int32(wanted_slot),
    )


def _heavy_children(above: np.ndarray) -> np.ndarray:
    """int64 [T], the tile below with most tiles in its subtree (the first of equals), NONE where there is none."""
    size = [1] * len(above)
    heavy = [NONE] * len(above)
    most = [0] * len(above)
    # Tiles come by depth, so those below have greater numbers.
    for tile, parent in zip(range(len(above) - 1, -1, -1), above[::-1].tolist(), strict=True):
        if parent != NONE:
            own = size[tile]
            size[parent] += own
            if own >= most[parent]:
                heavy[parent], most[parent] = tile, own
    return np.array(heavy, dtype=np.int64)


def _chains(above: np.ndarray, heavy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T], chain of each tile; int64 [L], level of each chain. Of one level the longest chains start first."""
    chain: list[int] = []
    level: list[int] = []
    goes_on = (above != NONE) & (heavy[above] == np.arange(len(above)))
    for parent, is_heavy in zip(above.tolist(), goes_on.tolist(), strict=True):
        if is_heavy:
            chain.append(chain[parent])
        else:
            chain.append(len(level))
            level.append(0 if parent == NONE else level[chain[parent]] + 1)
    chain_of_tile, level_of_chain = np.array(chain, dtype=np.int64), np.array(level, dtype=np.int64)
    order = np.lexsort((-np.bincount(chain_of_tile), level_of_chain))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[chain_of_tile], level_of_chain[order]


def _slots(tiles: TilePlan, heavy: np.ndarray, first_tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which states are stored, and where.

    Returns:
        int64 [exits + 1], slot of the state after each exit, NONE where it is not stored, the last is START's; int64
        [X], exits with which no chain goes on.
    """
    owner = tiles.tile_of_token[tiles.exit_token]
    continuing = np.where(heavy[owner] == NONE, START, tiles.entry[heavy[owner]])
    side_exits = np.flatnonzero(continuing != np.arange(len(owner)))
    is_stored = np.zeros(len(owner) + 1, dtype=bool)
    # Side exits are computed from the state that enters their tile, so that state is stored, too.
    for exits in (tiles.entry[first_tile], tiles.wanted, side_exits, tiles.entry[owner[side_exits]]):
        is_stored[exits] = True
    stored = np.flatnonzero(is_stored[:-1])
    of_exit = np.full(len(owner) + 1, NONE, dtype=np.int64)
    of_exit[stored] = np.arange(1, len(stored) + 1)
    of_exit[START] = INITIAL_SLOT
    return of_exit, side_exits
