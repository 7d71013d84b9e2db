"""A chain plan on the layout's device, and the ranges on the host that the launches of its levels need.

Legend: T tiles, C rows of a tile, L chains, X side exits, J joints.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device_together
from tree_kernels.tree_gated_delta_rule.chains import NONE, plan_chains
from tree_kernels.tree_gated_delta_rule.tiles import tile_plan
from tree_kernels.tree_layout import TreeLayout, kept


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
class DevicePlan:
    """Tensors are int32 on the device unless said otherwise; fields without docstring are as in `ChainPlan`."""

    num_slots: int
    """Slots of stored states; the first is the initial state's."""
    levels: tuple[Level, ...]
    """Levels from the roots down."""
    token: torch.Tensor
    row_end: torch.Tensor
    main_row: torch.Tensor
    entry_slot: torch.Tensor
    chain_start: torch.Tensor
    chain_slot: torch.Tensor
    side_start: torch.Tensor
    side_row: torch.Tensor
    side_slot: torch.Tensor
    source_start: torch.Tensor
    source: torch.Tensor
    stored_slot: torch.Tensor
    """[T], slot that the walk writes on entering the tile, or NONE."""
    side_tile: torch.Tensor
    """[X], tile of each side exit."""
    joint: torch.Tensor
    """[T], joint number of the tile, or NONE."""
    joint_tile: torch.Tensor
    """[J], tile of each joint."""
    joint_slot: torch.Tensor
    """[J], slot of the joint's entry state if other chains start from it, or NONE."""
    wanted_slot: torch.Tensor
    """int64, slot of each state that the caller requested."""
    root_sources: torch.Tensor
    """int64, chains that start from the initial state."""


@kept
def device_plan(layout: TreeLayout, tile_tokens: int, wanted: tuple[int, ...]) -> DevicePlan:
    """The chains of a layout on its device; cached with it."""
    plan = plan_chains(tile_plan(layout, tile_tokens=tile_tokens, wanted=wanted))
    padding = ((0, 0), (0, tile_tokens - plan.token.shape[1]))
    side_tile = np.repeat(np.arange(plan.num_tiles), np.diff(plan.side_start))
    joint_tile = np.flatnonzero((plan.stores_entry == 1) | (np.diff(plan.side_start) > 0))
    joint = np.full(plan.num_tiles, NONE)
    joint[joint_tile] = np.arange(len(joint_tile))
    stored_slot = np.where(plan.stores_entry == 1, plan.entry_slot, NONE)
    first_tile = plan.chain_start[plan.level_start]
    levels = tuple(
        Level(
            chains=range(plan.level_start[level], plan.level_start[level + 1]),
            sides=range(*np.searchsorted(side_tile, first_tile[level : level + 2]).tolist()),
            joints=range(*np.searchsorted(joint_tile, first_tile[level : level + 2]).tolist()),
        )
        for level in range(len(plan.level_start) - 1)
    )

    same = ("main_row", "entry_slot", "chain_start", "chain_slot", "side_start", "side_row", "side_slot")
    arrays = {name: getattr(plan, name) for name in (*same, "source_start", "source")} | {
        "token": np.pad(plan.token, padding, constant_values=layout.num_tokens),
        "row_end": np.pad(plan.row_end, padding),
        "stored_slot": stored_slot,
        "side_tile": side_tile,
        "joint": joint,
        "joint_tile": joint_tile,
        "joint_slot": stored_slot[joint_tile],
    }
    indices = {"wanted_slot": plan.wanted_slot, "root_sources": plan.source[: plan.source_start[1]]}
    host = [array.astype(np.int32, copy=False) for array in arrays.values()]
    host += [array.astype(np.int64) for array in indices.values()]
    tensors = dict(zip((*arrays, *indices), to_device_together(host, layout.device), strict=True))
    return DevicePlan(
        num_slots=plan.num_slots,
        levels=levels,
        **tensors,
    )
