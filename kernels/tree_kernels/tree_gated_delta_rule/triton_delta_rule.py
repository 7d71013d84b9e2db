"""The gated delta rule by Triton kernels: tiles at once, states along heavy chains, gradients summed in a fixed order.

Only the inputs and the inverses of the tiles wait for the backward; it walks the states again.
Legend: N unique tokens, T tiles, C rows of a tile, Hk key heads, H value heads, K and V state sizes.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tree_kernels.layout import TreeLayout
from tree_kernels.tree_gated_delta_rule.triton_gradients import inverse_gradients_kernel, score_gradients_kernel
from tree_kernels.tree_gated_delta_rule.triton_output import output_kernel, written_gradient_kernel
from tree_kernels.tree_gated_delta_rule.triton_plan import DevicePlan, device_plan
from tree_kernels.tree_gated_delta_rule.triton_prepare import (
    prepare_blocks_kernel,
    prepare_kernel,
    products_kernel,
)
from tree_kernels.tree_gated_delta_rule.triton_sizes import TILE_TOKENS, Launch, Launches, launches_for
from tree_kernels.tree_gated_delta_rule.triton_states import (
    joint_gradients_kernel,
    side_states_kernel,
    walk_back_kernel,
    walk_kernel,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Problem:
    """Inputs of one call and the sizes that all kernels share."""

    q: torch.Tensor
    """[N, Hk, K]"""
    k: torch.Tensor
    """[N, Hk, K]"""
    v: torch.Tensor
    """[N, H, V]"""
    g: torch.Tensor
    """[N, H] float32"""
    beta: torch.Tensor
    """[N, H] float32"""
    initial_state: torch.Tensor
    """[H, K, V] float32"""
    plan: DevicePlan
    scale: float
    tile_tokens: int
    launches: Launches

    @property
    def counts(self) -> tuple[int, int]:
        """N and T."""
        return self.v.shape[0], self.plan.num_tiles

    def of_tiles(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Unwritten [T, H, ...]."""
        return self.v.new_empty(self.plan.num_tiles, self.v.shape[1], *shape, dtype=dtype)

    def constants(self, launch: Launch) -> dict[str, Any]:
        """Compile-time sizes and launch options."""
        heads = self.v.shape[1]
        return {
            "HEADS": heads,
            "GROUP": heads // self.k.shape[1],
            "K": self.k.shape[2],
            "V": self.v.shape[2],
            "BK": launch.keys,
            "BV": launch.values,
            "C": self.tile_tokens,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }

    def walk_constants(self, launch: Launch) -> dict[str, Any]:
        """The same for kernels that hold all keys at once."""
        constants = self.constants(launch)
        del constants["BK"]
        return constants


def triton_delta_rule(
    q_NHK: torch.Tensor,
    k_NHK: torch.Tensor,
    v_NHV: torch.Tensor,
    g_NH: torch.Tensor,
    beta_NH: torch.Tensor,
    layout: TreeLayout,
    scale: float,
    initial_state_HKV: torch.Tensor,
    wanted: tuple[int, ...],
    *,
    tile_tokens: int = TILE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, Hv, V] in v's dtype and the float32 states after the wanted tokens; arguments as elsewhere."""
    plan = device_plan(layout, tile_tokens, wanted)
    inputs = (q_NHK, k_NHK, v_NHV, g_NH.float(), beta_NH.float(), initial_state_HKV)
    out_NHV, states = _TritonDeltaRule.apply(*inputs, plan, scale, tile_tokens)
    return out_NHV, states


class _TritonDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        problem = _problem(arguments)
        path, inverse = _prepare(problem)
        reads, written = _products(problem, path, inverse)
        entry, slots = _walk(problem, path, reads, written)
        out = _outputs(problem, path, written, entry)
        tensors = (problem.q, problem.k, problem.v, problem.g, problem.beta, problem.initial_state)
        ctx.save_for_backward(*tensors, path, inverse)
        ctx.rest = arguments[6:]
        return out, slots[problem.plan.wanted_slot]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, path, inverse = ctx.saved_tensors
        problem = _problem((*tensors, *ctx.rest))
        d_out = d_out.contiguous()
        reads, written = _products(problem, path, inverse)
        own = written.clone()
        entry, _ = _walk(problem, path, reads, written)
        d_written = _written_gradient(problem, path, d_out)
        d_main, d_side, d_source = _walk_back(problem, path, reads, d_out, d_written, d_states)
        d_q, d_k, d_reads, d_path = _score_gradients(problem, path, written, entry, d_out, d_written, d_main, d_side)
        d_v, d_g, d_beta = _inverse_gradients(problem, path, inverse, reads, own, d_written, d_reads, d_path, d_k)
        d_q, d_k = _sum_groups(problem, d_q), _sum_groups(problem, d_k)
        d_initial = d_source[problem.plan.root_sources].sum(0) if ctx.needs_input_grad[5] else None
        return d_q, d_k, d_v, d_g, d_beta, d_initial, None, None, None


def _problem(arguments: tuple[Any, ...]) -> _Problem:
    q, k, v, g, beta, initial_state, plan, scale, tile_tokens = arguments
    return _Problem(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=g.contiguous(),
        beta=beta.contiguous(),
        initial_state=initial_state.contiguous(),
        plan=plan,
        scale=scale,
        tile_tokens=tile_tokens,
        launches=launches_for(v.dtype, k.shape[2], v.shape[2]),
    )


def _prepare(problem: _Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Path sums [2, T, H, C] float32 and inverses [T, H, C, C]."""
    plan, tile = problem.plan, problem.tile_tokens
    path = problem.g.new_empty(2, plan.num_tiles, problem.v.shape[1], tile)
    inverse = problem.of_tiles(tile, tile)
    constants = problem.constants(problem.launches.prepare)
    del constants["V"], constants["BV"]
    kernel, block_rows = prepare_kernel, problem.launches.inverse_block_rows
    if block_rows is not None:
        kernel, constants = prepare_blocks_kernel, constants | {"R": min(block_rows, tile)}
    kernel[(plan.num_tiles, problem.v.shape[1])](
        problem.k, problem.g, problem.beta, plan.token, plan.row_end, path, inverse, *problem.counts, **constants
    )
    return path, inverse


def _products(problem: _Problem, path: torch.Tensor, inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What tiles read of their entry state [T, H, C, K], and what they write without one [T, H, C, V]."""
    plan, tile = problem.plan, problem.tile_tokens
    reads, own = problem.of_tiles(tile, problem.k.shape[2]), problem.of_tiles(tile, problem.v.shape[2])
    products_kernel[(plan.num_tiles, problem.v.shape[1])](
        problem.k, problem.v, problem.beta, plan.token, path, inverse, reads, own, *problem.counts,
        **problem.constants(problem.launches.products),
    )  # fmt: skip
    return reads, own


def _walk(
    problem: _Problem, path: torch.Tensor, reads: torch.Tensor, written: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """States that enter tiles [T, H, K, V] and float32 slots [S, H, K, V]; `written` becomes what tiles write."""
    plan, (heads, keys, values) = problem.plan, problem.initial_state.shape
    entry = problem.of_tiles(keys, values)
    slots = problem.initial_state.new_empty(plan.num_slots, heads, keys, values)
    slots[0] = problem.initial_state
    launch = problem.launches.walk
    constants = problem.walk_constants(launch)
    for level in plan.levels:
        walk_kernel[(values // launch.values, len(level.chains) * heads)](
            problem.k, reads, written, entry, slots, path, plan.token, plan.row_end, plan.main_row, plan.stored_slot,
            plan.chain_start, plan.chain_slot, level.chains.start, *problem.counts, **constants,
        )  # fmt: skip
        if level.sides:
            side_states_kernel[(values // launch.values, len(level.sides) * heads)](
                problem.k, written, slots, path, plan.token, plan.row_end, plan.side_tile, plan.side_row,
                plan.side_slot, plan.entry_slot, level.sides.start, *problem.counts, **constants,
            )  # fmt: skip
    return entry, slots


def _outputs(problem: _Problem, path: torch.Tensor, written: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """Outputs [N, H, V]."""
    plan, out = problem.plan, torch.empty_like(problem.v)
    output_kernel[(plan.num_tiles, problem.v.shape[1])](
        problem.q, problem.k, written, entry, path, plan.token, plan.row_end, out, *problem.counts, problem.scale,
        **problem.constants(problem.launches.output),
    )  # fmt: skip
    return out


def _written_gradient(problem: _Problem, path: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """What outputs of each tile itself ask of its writes, [T, H, C, V]."""
    plan = problem.plan
    d_written = problem.of_tiles(problem.tile_tokens, problem.v.shape[2])
    written_gradient_kernel[(plan.num_tiles, problem.v.shape[1])](
        problem.q, problem.k, d_out, path, plan.token, plan.row_end, d_written, *problem.counts, problem.scale,
        **problem.constants(problem.launches.written_gradient),
    )  # fmt: skip
    return d_written


def _walk_back(
    problem: _Problem,
    path: torch.Tensor,
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
    launch = problem.launches.walk_back
    constants = problem.walk_constants(launch)
    for level in reversed(plan.levels):
        if level.joints:
            joint_gradients_kernel[(values // launch.values, len(level.joints) * heads)](
                problem.k, d_written, d_side, d_source, d_joint, path, plan.token, plan.row_end, plan.joint_tile,
                plan.joint_slot, plan.side_start, plan.side_row, plan.side_slot, plan.source_start, plan.source,
                level.joints.start, *problem.counts, **constants,
            )  # fmt: skip
        walk_back_kernel[(values // launch.values, len(level.chains) * heads)](
            problem.q, problem.k, reads, d_out, d_written, d_main, d_source, d_joint, path, plan.token, plan.row_end,
            plan.main_row, plan.joint, plan.chain_start, level.chains.start, *problem.counts, problem.scale,
            **constants,
        )  # fmt: skip
    return d_main, d_side, d_source


def _score_gradients(
    problem: _Problem,
    path: torch.Tensor,
    written: torch.Tensor,
    entry: torch.Tensor,
    d_out: torch.Tensor,
    d_written: torch.Tensor,
    d_main: torch.Tensor,
    d_side: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ and part of dK [N, H, K], gradients of what tiles read [T, H, C, K], part of those of path sums [T, H, C]."""
    plan, (tokens, heads, _), keys = problem.plan, problem.v.shape, problem.k.shape[2]
    d_q, d_k = (problem.v.new_empty(tokens, heads, keys) for _ in range(2))
    d_reads = problem.of_tiles(problem.tile_tokens, keys)
    d_path = problem.of_tiles(problem.tile_tokens, dtype=torch.float32)
    score_gradients_kernel[(plan.num_tiles, heads)](
        problem.q, problem.k, written, entry, d_out, d_written, d_main, d_side, path, plan.token, plan.row_end,
        plan.main_row, plan.side_start, plan.side_row, d_q, d_k, d_reads, d_path, *problem.counts, problem.scale,
        **problem.constants(problem.launches.score_gradients),
    )  # fmt: skip
    return d_q, d_k, d_reads, d_path


def _inverse_gradients(
    problem: _Problem,
    path: torch.Tensor,
    inverse: torch.Tensor,
    reads: torch.Tensor,
    own: torch.Tensor,
    d_written: torch.Tensor,
    d_reads: torch.Tensor,
    d_path: torch.Tensor,
    d_k: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dV, dg, dbeta; `d_k` becomes whole."""
    plan, heads = problem.plan, problem.v.shape[1]
    d_v, d_g, d_beta = (torch.empty_like(t) for t in (problem.v, problem.g, problem.beta))
    inverse_gradients_kernel[(plan.num_tiles, heads)](
        problem.k, problem.v, problem.beta, inverse, reads, own, d_written, d_reads, d_path, path, plan.token,
        plan.row_end, d_k, d_v, d_g, d_beta, *problem.counts, **problem.constants(problem.launches.inverse_gradients),
    )  # fmt: skip
    return d_v, d_g, d_beta


def _sum_groups(problem: _Problem, of_value_heads: torch.Tensor) -> torch.Tensor:
    """Gradients [N, H, K] summed over the value heads that share a key head, [N, Hk, K]."""
    tokens, key_heads, keys = problem.k.shape
    if of_value_heads.shape == problem.k.shape:
        return of_value_heads
    return of_value_heads.view(tokens, key_heads, -1, keys).sum(2)
