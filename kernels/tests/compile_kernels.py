"""Compiles kernels on a machine without a GPU, as forward and backward launch them: python -m compile_kernels
CAPABILITY delta DTYPE, or CAPABILITY attention and the head sizes of keys and of values. Prints the names of those that
fit shared memory.

The delta rule has the heads of Qwen3.5, tree attention bfloat16 and every option. The interpreter must be off.
"""

import json
import sys
from typing import Any

import torch
from attention_problems import outputs_and_gradients, problem
from recurrences import DELTA_RULE, SCALE, chains_from_one_tile, rounded_leaves
from recurrences import outputs_and_gradients as gradients_of_delta_rule
from tree_shapes import layout_of
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_attention.triton_kernels import sizes
from tree_kernels.tree_attention.triton_kernels.autograd import triton_attention
from tree_kernels.tree_gated_delta_rule.triton_kernels import problem as delta_problem
from tree_kernels.tree_gated_delta_rule.triton_kernels.autograd import triton_delta_rule

CAPABILITY = int(sys.argv[1])
SHARED_MEMORY = {90: 227, 80: 99}[CAPABILITY] * 1024
"""99 KiB: Ada and the smaller Ampere."""
COMPILED: dict[str, list[int]] = {}
"""Bytes of shared memory of every compilation, by the kernel's name."""


class NoGpu:
    """What Triton asks a driver before it compiles."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", CAPABILITY, 32))


def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
    COMPILED.setdefault(kernel.__name__, []).append(compiled.metadata.shared)


def delta_rule(dtype: str) -> None:
    """Once with the walks of few chains, once with those of many."""
    parent = chains_from_one_tile()
    heads = {"groups": 16, "heads": 32, "key_size": 128, "value_size": 128}
    leaves, _ = rounded_leaves(DELTA_RULE, len(parent), getattr(torch, dtype), "cpu", **heads)
    delta_problem.shared_memory_of = lambda device: SHARED_MEMORY

    def in_tiles(*inputs: Any, initial_state: torch.Tensor) -> Any:
        return triton_delta_rule(*inputs, SCALE, initial_state, (7, 15))

    for processors in (1, 10_000):
        delta_problem.processors_of = lambda device, found=processors: found
        gradients_of_delta_rule(in_tiles, leaves, layout_of(parent))


def attention(head_size: int, value_size: int) -> None:
    leaves, grads = problem(65, (8, 2), head_size, 0, torch.bfloat16, value_size=value_size)
    sizes.measured_on = lambda device: CAPABILITY == 90

    def attend(*qkv: torch.Tensor, sinks: torch.Tensor) -> Any:
        rule = ScoreRule(scale=0.4, window=9, softcap=1.3)
        return triton_attention(*qkv, sinks, layout_of([*range(-1, 64)]), rule)

    outputs_and_gradients(attend, leaves, grads, sinks=True, lse=True)


if __name__ == "__main__":
    run, JITFunction.run = JITFunction.run, compile_only
    driver.set_active(NoGpu())
    operation, *arguments = sys.argv[2:]
    delta_rule(*arguments) if operation == "delta" else attention(*map(int, arguments))
    assert all(0 <= used <= SHARED_MEMORY for kernel in COMPILED.values() for used in kernel), COMPILED
    print(json.dumps(list(COMPILED)))
