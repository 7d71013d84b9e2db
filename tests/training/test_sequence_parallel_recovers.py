"""A rank that shares tokens and runs out of memory, wherever in a step: all ranks repeat it, and gradients stay.

The allocator's error is raised by hand in the middle of a layer.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from failing_memory import fail_once
from sharing_ranks import (
    Case,
    alone,
    assert_equal_gradients,
    assert_no_failures,
    averaged,
    build,
    groups_of,
    join,
    note_failures,
    prepare,
    spawn,
    step,
)

from tree_rl.cost.memory import budget

POINTS = [(direction, passes) for direction in ("forward", "backward") for passes in (0, 2)]
"""The failure comes in the pass of that direction through the last layer's MLP after so many others."""
CASES = [
    Case(shapes=("long_trunk",), max_tokens=200),
    Case(shapes=("branches",), max_tokens=8, is_coupled=True, is_sharded=True),
    Case(model="critic", shapes=("comb", "branches"), max_tokens=8, is_sharded=True),
    Case(model="one_key_head", shapes=("comb", ""), max_tokens=12, is_sharded=True),
]
"""With one group of four ranks, and with two groups of two."""


def check(case: Case, direction: str, passes: int, rank: int, failing: int, share: dist.ProcessGroup) -> None:
    """One rank of a group fails at a point."""
    expected, _ = alone(build(case.model), case.shapes, is_coupled=case.is_coupled)
    model, size = prepare(build(case.model), is_sharded=case.is_sharded), dist.get_world_size(share)
    left = fail_once(model, direction, passes)[0] if rank == failing % size else lambda: -1
    tree_step, _ = step(case, model, rank // size, share, self_check=False)
    assert_equal_gradients(averaged(model), expected)
    was_hit = torch.tensor(float(left() < 0))
    dist.all_reduce(was_hit, op=dist.ReduceOp.MIN)
    assert tree_step.out_of_memory == int(was_hit.item()), "not repeated, or repeated in vain"


def rank_main(rank: int, world: int, out: str, port: int) -> None:
    """Every case with one rank failing at every point."""
    join(rank, world, port)
    budget.GRANULARITY = 3
    shares = {groups: groups_of(rank, world, world // groups) for groups in (1, 2)}
    checks = (
        (
            f"{case.name} {direction} {passes}",
            partial(check, case, direction, passes, rank, number, shares[len(case.shapes)]),
        )
        for number, case in enumerate(CASES)
        for direction, passes in POINTS
    )
    note_failures(out, rank, checks)


@pytest.mark.slow
def test_all_ranks_repeat_the_step_together(tmp_path: Path) -> None:
    spawn(rank_main, 4, tmp_path)
    assert_no_failures(tmp_path, 4)
