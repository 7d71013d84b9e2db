"""Launches the kernels of forward and backward; the backward calls `products` and `walk` again.

Legend: N unique tokens, T tiles, C rows of a tile, H value heads, K and V state sizes, X side exits, S slots of stored
states, L chains.
"""

from collections.abc import Callable

import torch

from tree_kernels.tree_gated_delta_rule.triton_kernels.gradient_kernels import (
    gate_gradients_kernel,
    query_gradients_kernel,
    score_gradients_kernel,
)
from tree_kernels.tree_gated_delta_rule.triton_kernels.key_gradient_kernels import (
    exit_gradients_kernel,
    inverse_gradients_kernel,
    key_gradients_kernel,
)
from tree_kernels.tree_gated_delta_rule.triton_kernels.output_kernel import output_kernel
from tree_kernels.tree_gated_delta_rule.triton_kernels.prepare_kernels import (
    prepare_kernel,
    products_kernel,
)
from tree_kernels.tree_gated_delta_rule.triton_kernels.problem import Decays, Problem
from tree_kernels.tree_gated_delta_rule.triton_kernels.state_kernels import (
    joint_gradients_kernel,
    side_states_kernel,
    walk_back_kernel,
    walk_kernel,
)

OfWrites = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Takes the gradients of U and W, and the parts of the gradient of path sums that it writes; returns those of v and
beta, the inverses, and the gradient of overlaps. Without `corrects` the last two are not read."""


def prepare(problem: Problem) -> tuple[Decays, torch.Tensor]:
    """Decays and inverses [T, H, C, C] of all tiles."""
    plan, tile = problem.plan, problem.tile_tokens
    decays = Decays.empty(problem)
    inverse = problem.of_tiles(tile, tile)
    block_rows = problem.launches.inverse_block_rows
    prepare_kernel[problem.of_value_heads](
        problem.k, problem.g, problem.beta, plan.token, plan.row_end, plan.main_row, decays.path, decays.from_entry,
        decays.to_exit, decays.kept, inverse, *problem.counts,
        **problem.constants(problem.launches.prepare, prepare_kernel), R=block_rows and min(block_rows, tile),
    )  # fmt: skip
    return decays, inverse


def products(problem: Problem, decays: Decays, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices W [T, H, C, K], which multiply entry states, and the tiles' own part of U [T, H, C, V]."""
    plan, tile = problem.plan, problem.tile_tokens
    reads, own = problem.of_tiles(tile, problem.k.shape[2]), problem.of_tiles(tile, problem.v.shape[2])
    products_kernel[problem.of_value_heads](
        problem.k, problem.v, problem.beta, plan.token, decays.path, inverse, reads, own, *problem.counts,
        **problem.constants(problem.launches.products, products_kernel),
    )  # fmt: skip
    return reads, own


def walk(
    problem: Problem, decays: Decays, reads: torch.Tensor, own: torch.Tensor, written: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entry states of tiles [T, H, K, V] and float32 slots [S, H, K, V]; writes U to `written`, which may be `own`."""
    plan, (heads, keys, values) = problem.plan, problem.initial_state.shape
    entry = problem.of_tiles(keys, values)
    slots = problem.initial_state.new_empty(plan.num_slots, heads, keys, values)
    slots[0] = problem.initial_state
    launches = problem.launches
    for level in plan.levels:
        launch = problem.walk_launch(len(level.chains), launches.walk_of_few, launches.walk)
        walk_kernel[(values // launch.values, len(level.chains) * heads)](
            problem.k, reads, own, written, entry, slots, decays.to_exit, decays.kept, plan.token, plan.stored_slot,
            plan.chain_start, plan.chain_slot, level.chains.start, problem.counts[0],
            **problem.constants(launch, walk_kernel),
        )  # fmt: skip
        if level.sides:
            launch = launches.side_states
            side_states_kernel[(values // launch.values, len(level.sides) * heads)](
                problem.k, written, slots, decays.path, plan.token, plan.row_end, plan.side_tile, plan.side_row,
                plan.side_slot, plan.entry_slot, level.sides.start, *problem.counts,
                **problem.constants(launch, side_states_kernel),
            )  # fmt: skip
    return entry, slots


def outputs(problem: Problem, decays: Decays, written: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """Outputs [N, H, V]."""
    plan, out = problem.plan, torch.empty_like(problem.v)
    output_kernel[problem.of_value_heads](
        problem.q, problem.k, written, entry, decays.path, plan.token, plan.row_end, out, *problem.counts,
        problem.scale, **problem.constants(problem.launches.output, output_kernel),
    )  # fmt: skip
    return out


def gradients(
    problem: Problem,
    decays: Decays,
    reads: torch.Tensor,
    own: torch.Tensor,
    d_out: torch.Tensor,
    d_states: torch.Tensor,
    of_writes: OfWrites,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g, beta, and of the start state of each chain, then `d_states` [L + wanted, H, K, V].

    `reads` and `own` are from `products`; without `corrects` both are what the tiles write.
    """
    plan, launches, keys, tile = problem.plan, problem.launches, problem.k.shape[2], problem.tile_tokens
    written = torch.empty_like(own) if problem.corrects else own
    entry, _ = walk(problem, decays, reads, own, written)
    parts = (2, 2 * problem.corrects, keys // launches.query_gradients.keys, keys // launches.exit_gradients.keys)
    d_path = decays.path.new_empty(sum(parts), *decays.path.shape[1:])
    parts_of_scores, parts_of_inverse, parts_of_queries, parts_of_exits = d_path.split(parts)
    d_written, d_scores = torch.empty_like(own), problem.of_tiles(tile, tile)
    score_gradients_kernel[problem.of_value_heads](
        problem.q, problem.k, written, d_out, decays.path, plan.token, plan.row_end, d_written, d_scores,
        parts_of_scores, *problem.counts, problem.scale,
        **problem.constants(launches.score_gradients, score_gradients_kernel),
    )  # fmt: skip
    d_main, d_side, d_source = walk_back(problem, decays, reads, d_out, d_written, d_states)
    d_q, d_k, d_g = map(torch.empty_like, (problem.q, problem.k, problem.g))
    d_reads = torch.empty_like(reads) if problem.corrects else d_scores
    query_gradients_kernel[problem.of_key_heads](
        problem.q, problem.k, entry, d_out, d_written, d_scores, decays.path, plan.token, d_q, d_reads,
        parts_of_queries, *problem.counts, problem.scale,
        **problem.constants(launches.query_gradients, query_gradients_kernel),
    )  # fmt: skip
    d_v, d_beta, inverse, d_overlap = of_writes(d_written, d_reads, parts_of_inverse)
    # This kernel writes one part of dK, the next one adds the rest.
    exit_gradients_kernel[problem.of_key_heads](
        problem.k, written, entry, d_main, d_side, decays.path, decays.to_exit, decays.kept, plan.token, plan.row_end,
        plan.main_row, plan.side_start, plan.side_row, d_k, parts_of_exits, *problem.counts,
        **problem.constants(launches.exit_gradients, exit_gradients_kernel), SIDES=len(plan.side_row) > 0,
    )  # fmt: skip
    key_gradients_kernel[problem.of_key_heads](
        problem.q, problem.k, problem.beta, inverse, d_reads, d_scores, d_overlap, decays.path, plan.token, d_k,
        *problem.counts, **problem.constants(launches.key_gradients, key_gradients_kernel),
    )  # fmt: skip
    gate_gradients_kernel[problem.of_value_heads](
        d_path, plan.token, plan.row_end, d_g, *problem.counts, HEADS=problem.v.shape[1], C=tile, PARTS=len(d_path),
        num_warps=1,
    )  # fmt: skip
    return d_q, d_k, d_v, d_g, d_beta, d_source


def inverse_gradients(
    problem: Problem,
    decays: Decays,
    inverse: torch.Tensor,
    reads: torch.Tensor,
    own: torch.Tensor,
    d_written: torch.Tensor,
    d_reads: torch.Tensor,
    d_path: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """`OfWrites` of the delta rule."""
    plan, d_overlap = problem.plan, torch.empty_like(inverse)
    d_v, d_beta = torch.empty_like(problem.v), torch.empty_like(problem.beta)
    inverse_gradients_kernel[problem.of_value_heads](
        problem.k, problem.v, problem.beta, inverse, reads, own, d_written, d_reads, decays.path, plan.token,
        plan.row_end, d_v, d_beta, d_overlap, d_path, *problem.counts,
        **problem.constants(problem.launches.inverse_gradients, inverse_gradients_kernel),
    )  # fmt: skip
    return d_v, d_beta, inverse, d_overlap


def walk_back(
    problem: Problem,
    decays: Decays,
    reads: torch.Tensor,
    d_out: torch.Tensor,
    d_written: torch.Tensor,
    d_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the states that leave tiles along chains [T, H, K, V], of side exits [X, H, K, V], and of the start
    state of each chain, then `d_states` (float32); completes `d_written`."""
    plan, (heads, keys, values) = problem.plan, problem.initial_state.shape
    d_main = problem.of_tiles(keys, values)
    d_side = problem.v.new_empty(len(plan.side_row), heads, keys, values)
    d_joint = problem.initial_state.new_empty(len(plan.joint_tile), heads, keys, values)
    d_source = problem.initial_state.new_empty(len(plan.chain_slot) + len(d_states), heads, keys, values)
    d_source[len(plan.chain_slot) :] = d_states
    launches = problem.launches
    for level in reversed(plan.levels):
        if level.joints:
            launch = launches.joint_gradients
            joint_gradients_kernel[(values // launch.values, len(level.joints) * heads)](
                problem.k, d_written, d_side, d_source, d_joint, decays.path, plan.token, plan.row_end,
                plan.joint_tile, plan.joint_slot, plan.side_start, plan.side_row, plan.side_slot, plan.source_start,
                plan.source, level.joints.start, *problem.counts, **problem.constants(launch, joint_gradients_kernel),
            )  # fmt: skip
        launch = problem.walk_launch(len(level.chains), launches.walk_back_of_few, launches.walk_back)
        walk_back_kernel[(values // launch.values, len(level.chains) * heads)](
            problem.q, problem.k, reads, d_out, d_written, d_main, d_source, d_joint, decays.from_entry,
            decays.to_exit, decays.kept, plan.token, plan.joint, plan.chain_start, level.chains.start,
            problem.counts[0], problem.scale, **problem.constants(launch, walk_back_kernel),
        )  # fmt: skip
    return d_main, d_side, d_source
