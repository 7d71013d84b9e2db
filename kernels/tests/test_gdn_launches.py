"""Which launches the kernels of the delta rule take, by dtype, device and number of chains."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch

from tree_kernels.tree_gated_delta_rule.triton_kernels.problem import Problem
from tree_kernels.tree_gated_delta_rule.triton_kernels.sizes import AT_128, KIBI, Launch, launches_for


def test_a_level_of_few_chains_walks_in_narrow_deep_blocks() -> None:
    def taken(chains: int, processors: int) -> Launch:
        problem: Any = SimpleNamespace(v=torch.zeros(1, 32, 128), processors=processors)
        return Problem.walk_launch(problem, chains, AT_128.walk_of_few, AT_128.walk)

    # One chain of 32 heads is 128 programs, which run at once on an H200's 132 processors; two would take turns.
    assert [taken(1, 132), taken(2, 132), taken(1, 127)] == [AT_128.walk_of_few, AT_128.walk, AT_128.walk]


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
    differs = {field.name for field in fields(AT_128) if getattr(small, field.name) != getattr(AT_128, field.name)}
    assert differs == {"walk_of_few", "walk_back", "walk_back_of_few"}
    assert small.walk_back.stages < AT_128.walk_back.stages
