"""Ranks that share a forest's tokens: outputs and gradients of rows run alone, in float32, for any model and shape; so
where one of them runs out of memory, raised by hand in the middle of a layer: all repeat the step."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import sharing_ranks
import torch
import torch.distributed as dist
from failing_memory import fail_once
from rank_processes import run_ranks
from sharing_ranks import CRITIC, LORA, MODELS, SHAPES, Case, Found, assert_equal_gradients, build, prepare, step

from tree_rl.cost.memory import budget
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import plan_partitions, solver

FOUR_SHARE = [
    *(Case(shapes=(shape,)) for shape in ("identical_and_strict_prefix", "single_tokens", "one_token", "long_trunk")),
    *(Case(model=model, shapes=("comb",), max_tokens=6) for model in MODELS[1::2]),
    Case(model="head_a_rank", shapes=("comb",)),
    Case(model="latent", shapes=("branches",), max_tokens=7),
    Case(model="gemma3n", shapes=("one_row",)),
    Case(shapes=("branches",), max_tokens=4, is_coupled=True),
]
"""One group of four ranks."""
TWO_SHARE = [
    Case(shapes=("no_common_root", "one_row"), max_tokens=6),
    *(Case(model=model, shapes=("branches", "comb"), max_tokens=7) for model in MODELS[2::2]),
    Case(shapes=("comb", "two_tokens"), is_coupled=True, is_sharded=True),
    Case(shapes=("long_trunk", ""), max_tokens=9, is_sharded=True),
    Case(model=CRITIC, shapes=("one_token", "branches"), is_sharded=True),
    Case(model=LORA, shapes=("", "long_trunk")),
    Case(model="gemma3n", shapes=("one_token", "branches"), max_tokens=7),
]
"""Two groups of two ranks, each with rows of its own."""


CASES = [*((4, case) for case in FOUR_SHARE), *((2, case) for case in TWO_SHARE)]


@pytest.fixture(scope="module")
def four_ranks() -> list[list[Found]]:
    return run_ranks(sharing_ranks.rank_main, 4, CASES, seconds=60.0)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{size}:{case.name}" for size, case in CASES])
def test_ranks_that_share_tokens_train_as_rows_alone(four_ranks: list[list[Found]], number: int) -> None:
    size, case = CASES[number]
    sharing_ranks.assert_rows_alone(case, size, [of_rank[number] for of_rank in four_ranks])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_ranks_share_the_tokens_of_one_forest() -> None:
    # One query head to a rank, each key-value head on four; some forests have fewer tokens than ranks.
    others = [*(Case(model=model, shapes=("comb",)) for model in MODELS), *(Case(shapes=(shape,)) for shape in SHAPES)]
    # Four heads are none for eight ranks.
    cases = [*(case for case in FOUR_SHARE if case.model not in ("head_a_rank", "latent")), *others]
    of_ranks = run_ranks(sharing_ranks.rank_main, 8, [(8, case) for case in cases], seconds=60.0)
    for case, found in zip(cases, zip(*of_ranks, strict=True), strict=True):
        sharing_ranks.assert_rows_alone(case, 8, found)


def refused_main(rank: int) -> None:
    """What ranks say to rows that differ, and to heads that cannot be divided."""
    share = dist.new_group([0, 1])
    unequal = Case(shapes=("comb",) if rank else ("branches",))
    with pytest.raises(RuntimeError, match=r"^ranks \[0, 1\] share the tokens of their rows, but their rows or plans"):
        step(unequal, prepare(build(unequal.model)), 0, share)
    with pytest.raises((RuntimeError, ValueError), match="set ulysses_sequence_parallel_size to a divisor of 1"):
        step(Case(shapes=("comb",)), prepare(build("one_head")), 0, share)


def test_unequal_rows_and_too_few_heads_are_refused_on_every_rank() -> None:
    run_ranks(refused_main, 2, seconds=60.0)


BUSY = Case(shapes=("better_by_the_solver",), max_tokens=4)


def busy_main(rank: int) -> dict[str, torch.Tensor]:
    """The second rank's solver has no time: the clock is a second later whenever it asks."""
    if rank:
        solver.time = SimpleNamespace(monotonic=count().__next__)
    model = prepare(build(BUSY.model))
    step(BUSY, model, 0, dist.new_group([0, 1]))
    return sharing_ranks.averaged(model)


def test_a_busy_rank_plans_as_the_others() -> None:
    forest = Forest.from_rows(SHAPES[BUSY.shapes[0]])
    quick, solved = (plan_partitions(forest, 4, solver=name, time_limit_s=60.0) for name in ("heuristic", "cp_sat"))
    assert quick.partition_of_token.tolist() != solved.partition_of_token.tolist()
    expected, _ = sharing_ranks.rows_alone(BUSY.model, BUSY.shapes, BUSY.is_coupled)
    for got in run_ranks(busy_main, 2, seconds=60.0):
        assert_equal_gradients(got, expected)


POINTS = [(direction, passes) for direction in ("forward", "backward") for passes in (0, 2)]
"""The failure comes in the pass of that direction through the last layer's MLP after so many others."""
FAILING = [
    Case(shapes=("long_trunk",), max_tokens=200),
    Case(shapes=("branches",), max_tokens=8, is_coupled=True, is_sharded=True),
    Case(model="critic", shapes=("comb", "branches"), max_tokens=8, is_sharded=True),
    Case(model="one_key_head", shapes=("comb", ""), max_tokens=12, is_sharded=True),
]
"""With one group of four ranks, and with two groups of two."""


def recovered(
    case: Case, direction: str, passes: int, rank: int, failing: int, share: dist.ProcessGroup
) -> tuple[dict[str, torch.Tensor], int, bool]:
    """One rank of a group fails at a point: gradients, how often the step was repeated, and whether the rank failed."""
    model, size = prepare(build(case.model), is_sharded=case.is_sharded), dist.get_world_size(share)
    left = fail_once(model, direction, passes)[0] if rank == failing % size else lambda: -1
    tree_step, _ = step(case, model, rank // size, share, self_check=False)
    return sharing_ranks.averaged(model), tree_step.out_of_memory, left() < 0


def recovering_main(rank: int) -> list[Any]:
    """Every case with one rank failing at every point."""
    budget.GRANULARITY = 3
    shares = {groups: sharing_ranks.groups_of(rank, 4 // groups) for groups in (1, 2)}
    return [
        recovered(case, direction, passes, rank, number, shares[len(case.shapes)])
        for number, case in enumerate(FAILING)
        for direction, passes in POINTS
    ]


@pytest.mark.slow
def test_all_ranks_repeat_the_step_together() -> None:
    cases = [case for case in FAILING for _ in POINTS]
    for case, of_ranks in zip(cases, zip(*run_ranks(recovering_main, 4, seconds=60.0), strict=True), strict=True):
        expected, _ = sharing_ranks.rows_alone(case.model, case.shapes, case.is_coupled)
        for gradients, repeated, _ in of_ranks:
            assert_equal_gradients(gradients, expected)
            assert repeated == all(failed for _, _, failed in of_ranks), "not repeated, or repeated in vain"
