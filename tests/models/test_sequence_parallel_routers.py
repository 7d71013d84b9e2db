"""Routers whose tokens are scattered over ranks count, charge, record and replay as on one rank that has all rows."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import SHAPES
from scattered_routers import Case, Outcome, run
from sharing_ranks import assert_equal_gradients, assert_no_failures, groups_of, join, note_failures, spawn

BOTH, LONELY = ("branches", "comb"), ("identical_and_strict_prefix", "")
CASES = {
    2: [
        Case(family="qwen3_moe", shapes=BOTH),
        Case(family="mixtral", shapes=BOTH, max_tokens=8, knows_load=True),
        Case(family="qwen3_moe_dense_layer", shapes=LONELY, replays=True),
        Case(family="qwen3_moe", shapes=BOTH, max_tokens=8, coef=None, replays=True),
    ],
    4: [
        Case(family="qwen3_next", shapes=("comb",), replays=True),
        Case(family="mixtral", shapes=("single_tokens",)),
        Case(family="deepseek_v3", shapes=("comb",), coef=None, replays=True),
        Case(family="qwen3_moe", shapes=("identical_and_strict_prefix",), max_tokens=5, replays=True),
        Case(family="qwen3_moe", shapes=("branches",), coef=0.0, knows_load=True),
    ],
}
"""By the number of ranks that share tokens, of four in all."""
WORLD = 4


def check(case: Case, group: int, share: dist.ProcessGroup, expected: dict[str, Any]) -> None:
    got = run(case, [group], share)
    lengths = [sum(map(len, SHAPES.get(shape, []))) for shape in case.shapes]
    if lengths[group]:
        own = slice(sum(lengths[:group]), sum(lengths[: group + 1]))
        assert got.log_probs is not None and got.routes is not None
        torch.testing.assert_close(got.log_probs, expected["log_probs"][own], rtol=1e-5, atol=1e-5)
        assert torch.equal(got.routes, expected["routes"][own])
    for gradient in got.gradients.values():
        dist.all_reduce(gradient)
        gradient /= WORLD
    assert_equal_gradients(got.gradients, expected["gradients"])
    check_load(got, share, expected["load"])


def check_load(got: Outcome, share: dist.ProcessGroup, expected: tuple[Any, ...] | None) -> None:
    """The load is that of all rows; so is the mean over all ranks of the cost, alike on ranks that share tokens."""
    if got.load is None or expected is None:
        assert got.load is expected
        return
    *load, cost, has_extra_pass = got.load
    *expected_load, expected_cost, expects_extra_pass = expected
    assert load == pytest.approx(expected_load, rel=1e-12) and has_extra_pass == expects_extra_pass
    if cost is None or expected_cost is None:
        assert cost is expected_cost
        return
    costs: list[Any] = [None] * WORLD
    dist.all_gather_object(costs, cost)
    assert sum(costs) / WORLD == pytest.approx(expected_cost, rel=1e-6)
    assert {costs[rank] for rank in dist.get_process_group_ranks(share)} == {cost}


def rank_main(rank: int, world: int, out: str, port: int) -> None:
    """Run all cases and write what failed."""
    join(rank, world, port)
    expected = torch.load(f"{out}/expected.pt")
    shares = {size: groups_of(rank, world, size) for size in CASES}
    cases = [(size, case) for size, cases in CASES.items() for case in cases]
    note_failures(
        out,
        rank,
        ((f"{n}:{case.name}", partial(check, case, rank // n, shares[n], expected[n, case.name])) for n, case in cases),
    )


@pytest.mark.slow
def test_scattered_routers_are_those_of_one_rank(tmp_path: Path) -> None:
    expected = {
        (size, case.name): asdict(run(case, range(len(case.shapes)), None))
        for size, cases in CASES.items()
        for case in cases
    }
    torch.save(expected, tmp_path / "expected.pt")
    spawn(rank_main, WORLD, tmp_path)
    assert_no_failures(tmp_path, WORLD)
