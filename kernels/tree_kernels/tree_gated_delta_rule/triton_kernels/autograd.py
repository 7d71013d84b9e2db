"""The gated delta rule with Triton kernels: tiles in parallel, states along chains, gradients summed in a fixed order.

Only the inputs, their decays and the inverses of the tiles are saved; the backward recomputes the states.
Legend: N unique tokens, Hk key heads, H value heads, K and V state sizes.
"""

from functools import partial
from typing import Any

import torch

from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import device_plan
from tree_kernels.tree_gated_delta_rule.triton_kernels.launch import (
    gradients,
    inverse_gradients,
    outputs,
    prepare,
    products,
    walk,
)
from tree_kernels.tree_gated_delta_rule.triton_kernels.problem import Decays, Problem
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import TILE_TOKENS
from tree_kernels.tree_layout import TreeLayout


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
    """Outputs [N, Hv, V] in v's dtype and the float32 states after the `wanted` tokens, as `chunked_delta_rule`."""
    plan = device_plan(layout, tile_tokens, wanted)
    inputs = (q_NHK, k_NHK, v_NHV, g_NH.float(), beta_NH.float(), initial_state_HKV)
    out_NHV, states = _TritonDeltaRule.apply(*inputs, plan, scale, tile_tokens)
    return out_NHV, states


class _TritonDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        problem = _problem(arguments)
        decays, inverse = prepare(problem)
        reads, written = products(problem, decays, inverse)
        entry, slots = walk(problem, decays, reads, written, written)
        out = outputs(problem, decays, written, entry)
        tensors = (problem.q, problem.k, problem.v, problem.g, problem.beta, problem.initial_state)
        ctx.save_for_backward(*tensors, decays.path, decays.from_entry, decays.to_exit, decays.kept, inverse)
        ctx.rest = arguments[6:]
        return out, slots[problem.plan.wanted_slot]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, d_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, path, from_entry, to_exit, kept, inverse = ctx.saved_tensors
        problem = _problem((*tensors, *ctx.rest))
        decays = Decays(path=path, from_entry=from_entry, to_exit=to_exit, kept=kept)
        reads, own = products(problem, decays, inverse)
        of_writes = partial(inverse_gradients, problem, decays, inverse, reads, own)
        *of_tokens, d_source = gradients(problem, decays, reads, own, d_out.contiguous(), d_states, of_writes)
        d_initial = d_source[problem.plan.root_sources].sum(0) if ctx.needs_input_grad[5] else None
        return *of_tokens, d_initial, None, None, None


def _problem(arguments: tuple[Any, ...]) -> Problem:
    *tensors, plan, scale, tile_tokens = arguments
    return Problem.of(tensors, plan, tile_tokens, scale=scale)
