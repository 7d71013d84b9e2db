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
    def num_chains(self) -> int:
        """Number L of chains."""
        return len(self.chain_slot)

    @property
    def num_slots(self) -> int:
        """Number S of slots, the initial state's included."""
        return len(self.source_start) - 1


def plan_chains(tiles: TilePlan, subtree_end: np.ndarray) -> ChainPlan:
    """Order tiles by level and chain.

    Args:
        tiles: from `plan_tiles`.
        subtree_end: int32 [N].
    """
    # The last element stands for no exit: START and NONE point there.
    tile_of_exit = np.append(tiles.tile_of_token[tiles.exit_token], NONE)
    row_of_exit = np.append(tiles.row_of_token[tiles.exit_token], NONE)
    above = tile_of_exit[tiles.entry]
    heavy = _heavy_children(above)
    chains = _chains(above, heavy)
    order = np.array([tile for chain in chains for tile in chain.tiles], dtype=np.int64)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    chain_start = np.cumsum([0, *(len(chain.tiles) for chain in chains)])
    levels = np.bincount([chain.level for chain in chains]) if chains else np.zeros(0, dtype=np.int64)
    slots = _Slots(tiles, above, heavy, chains)
    token = tiles.token[order]
    end_of_row = np.append(subtree_end, 0)[token]
    row_end = (token[:, None, :] < end_of_row[:, :, None]).sum(-1)
    main_row = row_of_exit[np.append(tiles.entry, NONE)[heavy[order]]]
    side = sorted((int(number[tile_of_exit[x]]), x) for x in slots.side_exits)
    side_tile = np.array([tile for tile, _ in side], dtype=np.int64)
    side_exit = np.array([x for _, x in side], dtype=np.int64)
    is_first = np.zeros(len(order), dtype=bool)
    is_first[chain_start[:-1]] = True
    entry_slot = np.array([slots.of_entry(int(tile)) for tile in order], dtype=np.int64)
    source_start, source = slots.sources()

    def int32(values: object) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(values, dtype=np.int32))

    return ChainPlan(
        token=int32(token),
        row_end=int32(np.where(token < tiles.num_tokens, row_end, 0)),
        main_row=int32(main_row),
        entry_slot=int32(entry_slot),
        stores_entry=int32((entry_slot != NONE) & ~is_first),
        chain_start=int32(chain_start),
        chain_slot=int32([slots.of_exit(int(tiles.entry[chain.tiles[0]])) for chain in chains]),
        level_start=int32(np.concatenate([[0], np.cumsum(levels)])),
        side_start=int32(np.searchsorted(side_tile, np.arange(len(order) + 1))),
        side_row=int32(row_of_exit[side_exit]),
        side_slot=int32([slots.of_exit(int(x)) for x in side_exit]),
        source_start=int32(source_start),
        source=int32(source),
        wanted_slot=int32([slots.of_exit(int(x)) for x in tiles.wanted]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chain:
    level: int
    tiles: tuple[int, ...]


def _heavy_children(above: np.ndarray) -> np.ndarray:
    """int64 [T], the tile below with most tiles in its subtree (the first of equals), NONE where there is none."""
    size = np.ones(len(above), dtype=np.int64)
    heavy = np.full(len(above), NONE, dtype=np.int64)
    # Tiles come by depth, so those below have greater numbers.
    for tile in reversed(range(len(above))):
        parent = above[tile]
        if parent != NONE:
            size[parent] += size[tile]
            if heavy[parent] == NONE or size[tile] >= size[heavy[parent]]:
                heavy[parent] = tile
    return heavy


def _chains(above: np.ndarray, heavy: np.ndarray) -> list[_Chain]:
    """Chains by level, those of one level longest first: they start first."""
    level = np.zeros(len(above), dtype=np.int64)
    chains = []
    for tile, parent in enumerate(above.tolist()):
        if parent != NONE and heavy[parent] == tile:
            level[tile] = level[parent]
            continue
        level[tile] = 0 if parent == NONE else level[parent] + 1
        walked = [tile]
        while heavy[walked[-1]] != NONE:
            walked.append(int(heavy[walked[-1]]))
        chains.append(_Chain(level=int(level[tile]), tiles=tuple(walked)))
    return sorted(chains, key=lambda chain: (chain.level, -len(chain.tiles)))


class _Slots:
    """Which states are stored, and whose gradients flow back into them."""

    def __init__(self, tiles: TilePlan, above: np.ndarray, heavy: np.ndarray, chains: list[_Chain]) -> None:
        self._entry = tiles.entry
        self._chains = chains
        self._wanted = tiles.wanted.tolist()
        owner = tiles.tile_of_token[tiles.exit_token]
        continuing = np.where(heavy[owner] == NONE, START, tiles.entry[heavy[owner]])
        is_main = continuing == np.arange(len(owner))
        self.side_exits = np.flatnonzero(~is_main).tolist()
        started = {int(tiles.entry[chain.tiles[0]]) for chain in chains}
        # Side exits are computed from the state that enters their tile, so that state is stored, too.
        needed = {*started, *self._wanted, *self.side_exits, *(int(tiles.entry[owner[x]]) for x in self.side_exits)}
        self._slot = {START: INITIAL_SLOT}
        for exit_ in sorted(needed - {START}):
            self._slot[exit_] = len(self._slot)

    def of_exit(self, exit_: int) -> int:
        """Slot of a state, NONE where it is not stored."""
        return self._slot.get(exit_, NONE)

    def of_entry(self, tile: int) -> int:
        """Slot of the state that enters a tile."""
        return self.of_exit(int(self._entry[tile]))

    def sources(self) -> tuple[np.ndarray, np.ndarray]:
        """First source of each slot, and the sources: light chains, then wanted states."""
        target = [self.of_exit(int(self._entry[chain.tiles[0]])) for chain in self._chains]
        target += [self.of_exit(exit_) for exit_ in self._wanted]
        order = np.argsort(np.array(target, dtype=np.int64), kind="stable")
        return np.searchsorted(np.array(target)[order], np.arange(len(self._slot) + 1)), order
