"""Heavy-path decomposition of the tree of tiles: one program walks a chain of tiles with the state in registers.

A chain continues from a tile into the child tile with the largest subtree. Every other child starts a chain of the
next level from a stored state, so there are at most log2(T) + 1 levels. States are stored in float32 if another chain
starts from them, if the caller requested them, or if several states leave their tile.
Legend: N unique tokens, T tiles, C tokens of a tile, L chains, X side exits, J joints, S slots of stored states.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch

from tree_kernels.tree_gated_delta_rule.tiles import START, TilePlan

Array = TypeVar("Array", np.ndarray, torch.Tensor)

NONE = -1
INITIAL_SLOT = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Chains that run in parallel."""

    chains: range
    """Chains of the level."""
    sides: range
    """Side exits of the level's tiles."""
    joints: range
    """Joints of the level: tiles from which other chains start."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainPlan(Generic[Array]):
    """Tiles renumbered by level and chain, so that each chain and each level is one range; on the host or a device.
    Arrays are int32 unless said otherwise."""

    levels: tuple[Level, ...]
    """Levels from the roots down."""
    token: Array
    """[T, C], tokens of each tile in DFS order, padded with N."""
    row_end: Array
    """[T, C], first row of the tile past the subtree of each row: row i sees row j iff j <= i < row_end[j]."""
    main_row: Array
    """[T], row after which the chain continues in the next tile; NONE in its last tile."""
    entry_slot: Array
    """[T], slot of the state that enters the tile; NONE if it is not stored."""
    stored_slot: Array
    """[T], the same if the walk must write that slot; NONE if it is already written or not needed."""
    chain_start: Array
    """[L + 1], first tile of each chain."""
    chain_slot: Array
    """[L], slot of the state from which the chain starts."""
    side_start: Array
    """[T + 1], first side exit of each tile; a side exit is a state that leaves the tile outside its chain."""
    side_tile: Array
    """[X], tile of each side exit."""
    side_row: Array
    """[X], row after which the state leaves."""
    side_slot: Array
    """[X], slot that receives the state."""
    joint: Array
    """[T], joint number of the tile, or NONE."""
    joint_tile: Array
    """[J], tile of each joint."""
    joint_slot: Array
    """[J], slot of the joint's entry state if other chains start from it, or NONE."""
    source_start: Array
    """[S + 1], first entry of `source` for each slot."""
    source: Array
    """Origins of a slot's gradients: a chain that starts from its state, or L + index of a wanted state."""
    wanted_slot: Array
    """int64 [wanted], slot of each state that the caller requested."""
    root_sources: Array
    """int64, chains that start from the initial state."""

    @property
    def num_slots(self) -> int:
        """S, number of slots including the initial state's, the first."""
        return len(self.source_start) - 1


def plan_chains(tiles: TilePlan) -> ChainPlan[np.ndarray]:
    """Decompose the tree of tiles into chains."""
    # START and NONE are -1 and so index the last element, which means no exit.
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
    side_exit, side_tile = side_exits[by_tile], side_tile[by_tile]
    side_start = np.searchsorted(side_tile, np.arange(len(order) + 1))
    is_first = np.zeros(len(order), dtype=bool)
    is_first[chain_start[:-1]] = True
    entry_slot = slot_of_exit[tiles.entry[order]]
    stored_slot = np.where(is_first, NONE, entry_slot)
    joint_tile = np.flatnonzero((stored_slot != NONE) | (np.diff(side_start) > 0))
    joint = np.full(len(order), NONE)
    joint[joint_tile] = np.arange(len(joint_tile))
    chain_slot = slot_of_exit[tiles.entry[first_tile]]
    wanted_slot = slot_of_exit[tiles.wanted]
    # Origins of gradients: first chains, then wanted states.
    reads = np.concatenate([chain_slot, wanted_slot])
    source = np.argsort(reads, kind="stable")
    source_start = np.searchsorted(reads[source], np.arange(slot_of_exit.max() + 2))
    level_start = np.append(0, np.cumsum(np.bincount(level_of_chain)))
    starts = (level_start, *(np.searchsorted(one, chain_start[level_start]) for one in (side_tile, joint_tile)))
    chains, sides, joints = ([range(*pair) for pair in pairwise(start.tolist())] for start in starts)

    def int32(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=np.int32)

    return ChainPlan(
        levels=tuple(Level(chains=c, sides=s, joints=j) for c, s, j in zip(chains, sides, joints, strict=True)),
        token=int32(tiles.token[order]),
        row_end=int32(tiles.row_end[order]),
        main_row=int32(row_of_exit[np.append(tiles.entry, NONE)[heavy[order]]]),
        entry_slot=int32(entry_slot),
        stored_slot=int32(stored_slot),
        chain_start=int32(chain_start),
        chain_slot=int32(chain_slot),
        side_start=int32(side_start),
        side_tile=int32(side_tile),
        side_row=int32(row_of_exit[side_exit]),
        side_slot=int32(slot_of_exit[side_exit]),
        joint=int32(joint),
        joint_tile=int32(joint_tile),
        joint_slot=int32(stored_slot[joint_tile]),
        source_start=int32(source_start),
        source=int32(source),
        wanted_slot=wanted_slot,
        root_sources=source[: source_start[1]],
    )


def _heavy_children(above: np.ndarray) -> np.ndarray:
    """int64 [T], the child tile with the largest subtree (the first of equal ones), or NONE."""
    size = [1] * len(above)
    heavy = [NONE] * len(above)
    most = [0] * len(above)
    # Tiles are sorted by depth, so children have greater numbers.
    for tile, parent in zip(range(len(above) - 1, -1, -1), above[::-1].tolist(), strict=True):
        if parent != NONE:
            size[parent] += size[tile]
            if size[tile] >= most[parent]:
                heavy[parent], most[parent] = tile, size[tile]
    return np.array(heavy, dtype=np.int64)


def _chains(above: np.ndarray, heavy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T], chain of each tile; int64 [L], level of each chain. Within a level the longest chains come first."""
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
    """Assign slots to the states that must be stored.

    Returns:
        int64 [exits + 1], slot of the state at each exit, NONE if it is not stored, the last entry for START; int64
        [X], the side exits.
    """
    owner = tiles.tile_of_token[tiles.exit_token]
    continuing = np.where(heavy[owner] == NONE, START, tiles.entry[heavy[owner]])
    side_exits = np.flatnonzero(continuing != np.arange(len(owner)))
    is_stored = np.zeros(len(owner) + 1, dtype=bool)
    # Side exits are computed from the state that enters their tile, so that state is stored too.
    for exits in (tiles.entry[first_tile], tiles.wanted, side_exits, tiles.entry[owner[side_exits]]):
        is_stored[exits] = True
    stored = np.flatnonzero(is_stored[:-1])
    of_exit = np.full(len(owner) + 1, NONE, dtype=np.int64)
    of_exit[stored] = np.arange(1, len(stored) + 1)
    of_exit[START] = INITIAL_SLOT
    return of_exit, side_exits
