"""The kernels of the forward in their order; the backward calls `products` and `walk` again.

Legend: T tiles, C rows of a tile, H value heads, K and V state sizes, S slots of stored states.
"""

import torch

from tree_kernels.tree_gated_delta_rule.triton_output import output_kernel
from tree_kernels.tree_gated_delta_rule.triton_prepare import (
    prepare_blocks_kernel,
    prepare_kernel,
    products_kernel,
)
from tree_kernels.tree_gated_delta_rule.triton_problem import Decays, Problem
from tree_kernels.tree_gated_delta_rule.triton_states import side_states_kernel, walk_kernel


def prepare(problem: Problem) -> tuple[Decays, torch.Tensor]:
    """Decays in tiles, and the inverses of the tiles [T, H, C, C]."""
    plan, tile = problem.plan, problem.tile_tokens
    decays = Decays(
        path=problem.g.new_empty(2, *problem.of_value_heads, tile),
        from_entry=problem.of_tiles(tile, dtype=torch.float32),
        to_exit=problem.of_tiles(tile, dtype=torch.float32),
        kept=problem.of_tiles(dtype=torch.float32),
    )
    inverse = problem.of_tiles(tile, tile)
    constants = problem.constants(problem.launches.prepare)
    del constants["V"], constants["BV"]
    kernel, block_rows = prepare_kernel, problem.launches.inverse_block_rows
    if block_rows is not None:
        kernel, constants = prepare_blocks_kernel, constants | {"R": min(block_rows, tile)}
    kernel[problem.of_value_heads](
        problem.k, problem.g, problem.beta, plan.token, plan.row_end, plan.main_row, decays.path, decays.from_entry,
        decays.to_exit, decays.kept, inverse, *problem.counts, **constants,
    )  # fmt: skip
    return decays, inverse


def products(problem: Problem, decays: Decays, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tiles read of their entry state [T, H, C, K], and what they write without one [T, H, C, V]."""
    plan, tile = problem.plan, problem.tile_tokens
    reads, own = problem.of_tiles(tile, problem.k.shape[2]), problem.of_tiles(tile, problem.v.shape[2])
    products_kernel[problem.of_value_heads](
        problem.k, problem.v, problem.beta, plan.token, decays.path, inverse, reads, own, *problem.counts,
        **problem.constants(problem.launches.products),
    )  # fmt: skip
    return reads, own


def walk(
    problem: Problem, decays: Decays, reads: torch.Tensor, own: torch.Tensor, written: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States that enter tiles [T, H, K, V] and float32 slots [S, H, K, V]; `written`, which may be `own`, becomes
    what tiles write."""
    plan, (heads, keys, values) = problem.plan, problem.initial_state.shape
    entry = problem.of_tiles(keys, values)
    slots = problem.initial_state.new_empty(plan.num_slots, heads, keys, values)
    slots[0] = problem.initial_state
    launches = problem.launches
    for level in plan.levels:
        launch = problem.walk_launch(len(level.chains), launches.walk_of_few, launches.walk)
        walk_kernel[(values // launch.values, len(level.chains) * heads)](
            problem.k, reads, own, written, entry, slots, decays.to_exit, decays.kept, plan.token, plan.stored_slot,
            plan.chain_start, plan.chain_slot, level.chains.start, problem.counts[0], **problem.walk_constants(launch),
        )  # fmt: skip
        if level.sides:
            launch = launches.side_states
            side_states_kernel[(values // launch.values, len(level.sides) * heads)](
                problem.k, written, slots, decays.path, plan.token, plan.row_end, plan.side_tile, plan.side_row,
                plan.side_slot, plan.entry_slot, level.sides.start, *problem.counts, **problem.walk_constants(launch),
            )  # fmt: skip
    return entry, slots


def outputs(problem: Problem, decays: Decays, written: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """Outputs [N, H, V]."""
    plan, out = problem.plan, torch.empty_like(problem.v)
    output_kernel[problem.of_value_heads](
        problem.q, problem.k, written, entry, decays.path, plan.token, plan.row_end, out, *problem.counts,
        problem.scale, **problem.constants(problem.launches.output),
    )  # fmt: skip
    return out
