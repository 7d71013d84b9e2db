"""The kernels of the backward in their order.

Legend: N unique tokens, T tiles, C rows of a tile, Hk key heads, H value heads, K and V state sizes, X side exits.
"""

import torch

from tree_kernels.tree_gated_delta_rule.triton_forward import products, walk
from tree_kernels.tree_gated_delta_rule.triton_gradients import (
    gate_gradients_kernel,
    query_gradients_kernel,
    score_gradients_kernel,
)
from tree_kernels.tree_gated_delta_rule.triton_key_gradients import (
    exit_gradients_kernel,
    inverse_gradients_kernel,
    key_gradients_kernel,
)
from tree_kernels.tree_gated_delta_rule.triton_problem import Decays, Problem
from tree_kernels.tree_gated_delta_rule.triton_states import joint_gradients_kernel, walk_back_kernel


def gradients(
    problem: Problem, decays: Decays, inverse: torch.Tensor, d_out: torch.Tensor, d_states: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, g and beta, and of the state each chain started from, [L + wanted, H, K, V] float32."""
    launches, keys = problem.launches, problem.k.shape[2]
    reads, own = products(problem, decays, inverse)
    written = torch.empty_like(own)
    entry, _ = walk(problem, decays, reads, own, written)
    of_queries, of_exits = keys // launches.query_gradients.keys, keys // launches.exit_gradients.keys
    d_path = decays.path.new_empty(4 + of_queries + of_exits, *decays.path.shape[1:])
    parts_of_scores, parts_of_inverse, parts_of_queries, parts_of_exits = d_path.split([2, 2, of_queries, of_exits])
    d_written, d_scores = _score_gradients(problem, decays, written, d_out, parts_of_scores)
    d_main, d_side, d_source = _walk_back(problem, decays, reads, d_out, d_written, d_states)
    d_q, d_reads = _query_gradients(problem, decays, entry, d_out, d_written, d_scores, parts_of_queries)
    d_v, d_beta, d_overlap = _inverse_gradients(
        problem, decays, inverse, reads, own, d_written, d_reads, parts_of_inverse
    )
    d_k = _exit_gradients(problem, decays, written, entry, d_main, d_side, parts_of_exits)
    _add_key_gradients(problem, decays, inverse, d_reads, d_scores, d_overlap, d_k)
    return d_q, d_k, d_v, _gate_gradients(problem, d_path), d_beta, d_source


def _score_gradients(
    problem: Problem, decays: Decays, written: torch.Tensor, d_out: torch.Tensor, d_path: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What outputs of each tile itself ask of its writes [T, H, C, V], transposed gradients of scores [T, H, C, C]."""
    plan, tile = problem.plan, problem.tile_tokens
    d_written, d_scores = problem.of_tiles(tile, problem.v.shape[2]), problem.of_tiles(tile, tile)
    score_gradients_kernel[problem.of_value_heads](
        problem.q, problem.k, written, d_out, decays.path, plan.token, plan.row_end, d_written, d_scores, d_path,
        *problem.counts, problem.scale, **problem.constants(problem.launches.score_gradients),
    )  # fmt: skip
    return d_written, d_scores


def _walk_back(
    problem: Problem,
    decays: Decays,
    reads: torch.Tensor,
    d_out: torch.Tensor,
    d_written: torch.Tensor,
    d_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the states that leave tiles [T, H, K, V], of side exits [X, H, K, V], and of each chain's start
    (float32, the wanted states' behind them); `d_written` becomes whole."""
    plan, (heads, keys, values) = problem.plan, problem.initial_state.shape
    d_main = problem.of_tiles(keys, values)
    d_side = problem.v.new_empty(plan.num_sides, heads, keys, values)
    d_joint = problem.initial_state.new_empty(plan.num_joints, heads, keys, values)
    d_source = problem.initial_state.new_empty(plan.num_chains + len(d_states), heads, keys, values)
    d_source[plan.num_chains :] = d_states
    launches = problem.launches
    for level in reversed(plan.levels):
        if level.joints:
            launch = launches.joint_gradients
            joint_gradients_kernel[(values // launch.values, len(level.joints) * heads)](
                problem.k, d_written, d_side, d_source, d_joint, decays.path, plan.token, plan.row_end,
                plan.joint_tile, plan.joint_slot, plan.side_start, plan.side_row, plan.side_slot, plan.source_start,
                plan.source, level.joints.start, *problem.counts, **problem.walk_constants(launch),
            )  # fmt: skip
        launch = problem.walk_launch(len(level.chains), launches.walk_back_of_few, launches.walk_back)
        walk_back_kernel[(values // launch.values, len(level.chains) * heads)](
            problem.q, problem.k, reads, d_out, d_written, d_main, d_source, d_joint, decays.from_entry,
            decays.to_exit, decays.kept, plan.token, plan.joint, plan.chain_start, level.chains.start,
            problem.counts[0], problem.scale, **problem.walk_constants(launch),
        )  # fmt: skip
    return d_main, d_side, d_source


def _query_gradients(
    problem: Problem,
    decays: Decays,
    entry: torch.Tensor,
    d_out: torch.Tensor,
    d_written: torch.Tensor,
    d_scores: torch.Tensor,
    d_path: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dQ [N, Hk, K] and gradients of what tiles read [T, H, C, K]."""
    d_q, d_reads = torch.empty_like(problem.q), problem.of_tiles(problem.tile_tokens, problem.k.shape[2])
    query_gradients_kernel[problem.of_key_heads](
        problem.q, problem.k, entry, d_out, d_written, d_scores, decays.path, problem.plan.token, d_q, d_reads, d_path,
        *problem.counts, problem.scale, **problem.constants(problem.launches.query_gradients),
    )  # fmt: skip
    return d_q, d_reads


def _inverse_gradients(
    problem: Problem,
    decays: Decays,
    inverse: torch.Tensor,
    reads: torch.Tensor,
    own: torch.Tensor,
    d_written: torch.Tensor,
    d_reads: torch.Tensor,
    d_path: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dV, dbeta and gradients of overlaps of keys [T, H, C, C]."""
    plan, d_v, d_beta = problem.plan, torch.empty_like(problem.v), torch.empty_like(problem.beta)
    d_overlap = torch.empty_like(inverse)
    inverse_gradients_kernel[problem.of_value_heads](
        problem.k, problem.v, problem.beta, inverse, reads, own, d_written, d_reads, decays.path, plan.token,
        plan.row_end, d_v, d_beta, d_overlap, d_path, *problem.counts,
        **problem.constants(problem.launches.inverse_gradients),
    )  # fmt: skip
    return d_v, d_beta, d_overlap


def _exit_gradients(
    problem: Problem,
    decays: Decays,
    written: torch.Tensor,
    entry: torch.Tensor,
    d_main: torch.Tensor,
    d_side: torch.Tensor,
    d_path: torch.Tensor,
) -> torch.Tensor:
    """Part of dK [N, Hk, K]."""
    plan, d_k = problem.plan, torch.empty_like(problem.k)
    exit_gradients_kernel[problem.of_key_heads](
        problem.k, written, entry, d_main, d_side, decays.path, decays.to_exit, decays.kept, plan.token, plan.row_end,
        plan.main_row, plan.side_start, plan.side_row, d_k, d_path, *problem.counts,
        **problem.constants(problem.launches.exit_gradients), SIDES=plan.num_sides > 0,
    )  # fmt: skip
    return d_k


def _add_key_gradients(
    problem: Problem,
    decays: Decays,
    inverse: torch.Tensor,
    d_reads: torch.Tensor,
    d_scores: torch.Tensor,
    d_overlap: torch.Tensor,
    d_k: torch.Tensor,
) -> None:
    """The rest of dK."""
    constants = problem.constants(problem.launches.key_gradients)
    key_gradients_kernel[problem.of_key_heads](
        problem.q, problem.k, problem.beta, inverse, d_reads, d_scores, d_overlap, decays.path, problem.plan.token, d_k,
        *problem.counts, **constants,
    )  # fmt: skip


def _gate_gradients(problem: Problem, d_path: torch.Tensor) -> torch.Tensor:
    """dg [N, H] from the parts of the gradient of path sums."""
    plan, d_g = problem.plan, torch.empty_like(problem.g)
    gate_gradients_kernel[problem.of_value_heads](
        d_path, plan.token, plan.row_end, d_g, *problem.counts,
        HEADS=problem.v.shape[1], C=problem.tile_tokens, PARTS=len(d_path), num_warps=1,
    )  # fmt: skip
    return d_g
