"""Mamba 2's recurrence with Triton kernels: those of the gated delta rule without its correction.

Queries are C, keys are B, and a tile writes dt x. Only the inputs and their decays are saved.
Legend: N unique tokens, G groups of heads that share B and C, H heads, K state size, P head size.
"""

from functools import partial
from typing import Any

import torch

from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import device_plan
from tree_kernels.tree_gated_delta_rule.triton_kernels.launch import gradients, outputs, walk
from tree_kernels.tree_gated_delta_rule.triton_kernels.problem import Decays, Problem
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import TILE_TOKENS
from tree_kernels.tree_layout import TreeLayout
from tree_kernels.tree_state_space.triton_kernels.write_kernels import write_gradients_kernel, write_kernel

HEADS_PER_GROUP = 8
"""Most heads that one program sums gradients of B and C over; larger groups are divided among several programs."""


def triton_state_space(
    x_NHP: torch.Tensor,
    b_NGK: torch.Tensor,
    c_NGK: torch.Tensor,
    g_NH: torch.Tensor,
    dt_NH: torch.Tensor,
    layout: TreeLayout,
    initial_state_HKP: torch.Tensor,
    wanted: tuple[int, ...],
    *,
    tile_tokens: int = TILE_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, H, P] in x's dtype and the float32 states after the `wanted` tokens, as `chunked_state_space`."""
    group = x_NHP.shape[1] // b_NGK.shape[1]
    copies = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= HEADS_PER_GROUP)
    if copies > 1:
        b_NGK, c_NGK = (t.repeat_interleave(copies, dim=1) for t in (b_NGK, c_NGK))
    plan = device_plan(layout, tile_tokens, wanted)
    inputs = (x_NHP, b_NGK, c_NGK, g_NH.float(), dt_NH.float(), initial_state_HKP)
    out_NHP, states = _TritonStateSpace.apply(*inputs, plan, tile_tokens)
    return out_NHP, states


class _TritonStateSpace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        problem = _problem(arguments)
        decays, written = _writes(problem)
        entry, slots = walk(problem, decays, written, written, written)
        out = outputs(problem, decays, written, entry)
        ctx.save_for_backward(problem.v, problem.k, problem.q, problem.g, problem.beta, problem.initial_state)
        ctx.rest = arguments[6:]
        return out, slots[problem.plan.wanted_slot]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        problem = _problem((*ctx.saved_tensors, *ctx.rest))
        decays, written = _writes(problem)
        of_writes = partial(_write_gradients, problem)
        d_c, d_b, d_x, d_g, d_dt, d_source = gradients(
            problem, decays, written, written, d_out.contiguous(), d_states, of_writes
        )
        d_initial = d_source[problem.plan.root_sources].sum(0) if ctx.needs_input_grad[5] else None
        return d_x, d_b, d_c, d_g, d_dt, d_initial, None, None


def _problem(arguments: tuple[Any, ...]) -> Problem:
    x, b, c, g, dt, initial_state, plan, tile_tokens = arguments
    return Problem.of((c, b, x, g, dt, initial_state), plan, tile_tokens, scale=1.0, corrects=False)


def _writes(problem: Problem) -> tuple[Decays, torch.Tensor]:
    """Decays, and what tiles write [T, H, C, P]."""
    plan, tile = problem.plan, problem.tile_tokens
    decays = Decays.empty(problem)
    written = problem.of_tiles(tile, problem.v.shape[2])
    write_kernel[problem.of_value_heads](
        problem.v, problem.g, problem.beta, plan.token, plan.row_end, plan.main_row, decays.path, decays.from_entry,
        decays.to_exit, decays.kept, written, *problem.counts,
        **problem.constants(problem.launches.products, write_kernel),
    )  # fmt: skip
    return decays, written


def _write_gradients(
    problem: Problem, d_written: torch.Tensor, d_scores: torch.Tensor, _d_path: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`OfWrites` of Mamba 2."""
    d_x, d_dt = torch.empty_like(problem.v), torch.empty_like(problem.beta)
    write_gradients_kernel[problem.of_value_heads](
        problem.v, problem.beta, d_written, problem.plan.token, d_x, d_dt, problem.counts[0],
        **problem.constants(problem.launches.products, write_gradients_kernel),
    )  # fmt: skip
    return d_x, d_dt, d_scores, d_scores
