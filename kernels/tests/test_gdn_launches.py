"""Which launches the kernels of the delta rule take, by dtype, device and number of chains."""

from dataclasses import fields

import torch
from recurrences import fork
from tree_shapes import subtree_end_of

from tree_kernels import TreeLayout
from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import device_plan
from tree_kernels.tree_gated_delta_rule.triton_kernels.problem import Problem
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import AT_128, KIBI, launches_for

HEADS, SIZE = 32, 128
ON_AN_H200 = 132


def problem_of(parent: list[int], processors: int) -> Problem:
    keys = torch.zeros(len(parent), HEADS, SIZE, dtype=torch.bfloat16)
    gates = torch.zeros(len(parent), HEADS)
    return Problem(
        q=keys,
        k=keys,
        v=keys,
        g=gates,
        beta=gates,
        initial_state=torch.zeros(HEADS, SIZE, SIZE),
        plan=device_plan(TreeLayout.from_subtree_end(subtree_end_of(parent)), 64, ()),
        scale=1.0,
        tile_tokens=64,
        launches=AT_128,
        processors=processors,
    )


def test_a_level_of_few_chains_walks_in_narrow_deep_blocks() -> None:
    problem = problem_of(fork(64, [64] * 3), ON_AN_H200)
    assert [len(level.chains) for level in problem.plan.levels] == [1, 2]
    taken = [problem.walk_launch(len(level.chains), AT_128.walk_of_few, AT_128.walk) for level in problem.plan.levels]
    # One chain of 32 heads is 128 programs, which run at once; two would take turns.
    assert taken == [AT_128.walk_of_few, AT_128.walk]
    assert problem_of(fork(64, []), 127).walk_launch(1, AT_128.walk_of_few, AT_128.walk) == AT_128.walk


def test_half_precision_at_128_takes_what_was_measured() -> None:
    assert launches_for(torch.bfloat16, 128, 128) == AT_128
    of_float16, of_float32 = (launches_for(dtype, 128, 128) for dtype in (torch.float16, torch.float32))
    assert of_float16.walk_back == AT_128.walk_back != of_float32.walk_back
    # tf32 would cost the others bits that they keep.
    assert AT_128.inverse_block_rows == 8
    for launches in (of_float16, of_float32, launches_for(torch.bfloat16, 64, 64)):
        assert launches.inverse_block_rows is None


def test_less_shared_memory_takes_shallower_walks_and_nothing_else() -> None:
    small = launches_for(torch.bfloat16, 128, 128, 99 * KIBI)
    differs = {
        name for name in (field.name for field in fields(AT_128)) if getattr(small, name) != getattr(AT_128, name)
    }
    assert differs == {"walk_of_few", "walk_back", "walk_back_of_few"}
    assert small.walk_back.stages < AT_128.walk_back.stages
