"""Against brute force over every valid partition: fewest, then least relayed, then shallowest."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions
from tree_rl.tree.partition.exact_bins import bound_bins, pack_loads
from tree_rl.tree.partition.heuristic import greedy_cuts, least_depth, lower_bounds
from tree_rl.tree.partition.problem import measure_cuts, reduce_forest

Score = tuple[int, int, int]
Open = tuple[int, int, int, int]
"""Tokens that hang together on top, and below or beside them: partitions closed, tokens relayed, levels."""


def best_score(forest: Forest, budget: int) -> Score:
    """Try every subset of cuts and every way to share partitions below one token."""
    segments = forest.segments
    unit_of_token: list[int] = []
    parent: list[int] = []
    size: list[int] = []
    past: list[int] = []
    for segment in range(len(segments)):
        start, length = int(segments.start[segment]), int(segments.lengths[segment])
        step = 1 if length > budget else length
        for token in range(start, start + length, step):
            above = int(forest.parent[token])
            parent.append(unit_of_token[above] if above >= 0 else -1)
            size.append(step)
            past.append(int(forest.position[token]))
            unit_of_token += [len(size) - 1] * step
    children: list[list[int]] = [[] for _ in range(len(size) + 1)]
    for unit, above in enumerate(parent):
        children[above].append(unit)
    states: list[set[Open]] = [set() for _ in size]
    for unit in reversed(range(len(size))):
        states[unit] = set(combine(size[unit], past[unit] + size[unit], [states[c] for c in children[unit]], budget))
    closed = combine(0, 0, [states[root] for root in children[-1]], budget)
    return min((count, relayed, level - 1) for load, count, relayed, level in closed if load == 0)


def combine(own: int, past: int, states: list[set[Open]], budget: int) -> Iterator[Open]:
    """What can hang on top of a token, for every state, subset and sharing of what hangs below it."""
    partial: set[tuple[int, int, int, int, tuple[int, ...]]] = {(own, 0, 0, 1, ())}
    for options in states:
        extended = set()
        for load, count, relayed, level, bins in partial:
            for more, closed, passed, below in options:
                total, context = count + closed, relayed + passed
                if load + more <= budget:
                    extended.add((load + more, total, context, max(level, below), bins))
                deeper = max(level, below + 1)
                extended.add((load, total + 1, context + past, deeper, tuple(sorted((*bins, more)))))
                for place, filled in enumerate(bins):
                    if filled + more <= budget:
                        shared = (*bins[:place], filled + more, *bins[place + 1 :])
                        extended.add((load, total, context, deeper, tuple(sorted(shared))))
        partial = extended
    return (state[:4] for state in partial)


def grow(seed: int) -> tuple[Forest, int]:
    """Rows that leave one another at random tokens, in runs: long segments, prefixes, several trees; and a budget."""
    draw = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(int(draw.integers(2, 9))):
        shared: list[int] = []
        if rows and draw.random() < 0.8:
            source = rows[int(draw.integers(len(rows)))]
            shared = source[: int(draw.integers(1, len(source) + 1))]
        rows.append(shared + [int(draw.integers(3))] * int(draw.integers(not shared, 8)))
    return Forest.from_rows(rows), int(draw.integers(1, 14))


def score(plan: PartitionPlan) -> Score:
    return plan.num_partitions, plan.relayed_tokens, plan.depth


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 1_200), marks=pytest.mark.slow)])
def test_small_forests_are_cut_optimally(seeds):
    improved = 0
    for seed in seeds:
        forest, budget = grow(seed)
        best = best_score(forest, budget)
        problem = reduce_forest(forest, budget)
        bounds = lower_bounds(problem)
        assert bounds[0] <= best[0] and bounds[1] <= best[1]
        assert least_depth(problem, best[1]) <= best[2]
        quick = plan_partitions(forest, budget, solver="heuristic")
        assert score(quick) == best or (quick.num_partitions == best[0] and not quick.is_optimal)
        if greedy_cuts(problem)[1]:
            assert score(quick)[:2] == best[:2] == bounds
        improved += score(quick) != best
        for solver in ("auto", "cp_sat"):
            plan = plan_partitions(forest, budget, solver=solver, time_limit_s=60.0)
            assert plan.is_optimal and plan.lower_bound == best[0]
            assert score(plan) == best, f"seed {seed}, {solver}"
    assert improved > len(seeds) // 60


@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=60),
    budget=st.integers(1, 40),
    limit=st.sampled_from([0.0, 0.002, 0.2]),
)
@settings(max_examples=30, deadline=None)
def test_the_solver_is_never_worse_and_repeats_itself(rows, budget, limit):
    forest = Forest.from_rows(rows)
    heuristic = plan_partitions(forest, budget, solver="heuristic")
    plan = plan_partitions(forest, budget, solver="cp_sat", time_limit_s=limit)
    assert score(plan) <= score(heuristic)
    assert max(heuristic.lower_bound, plan.lower_bound) <= plan.num_partitions
    if plan.is_optimal:
        again = plan_partitions(forest, budget, solver="cp_sat", time_limit_s=limit)
        assert again.partition_of_token.tolist() == plan.partition_of_token.tolist()
        assert plan.lower_bound == plan.num_partitions


def test_cuts_that_are_no_plan_are_refused():
    problem = reduce_forest(Forest.from_rows([[1] * 3, [2] * 4, [3, 3, 4, 4], [3, 3, 5, 5]]), 5)
    with pytest.raises(ValueError, match="exceeds 5"):
        measure_cuts(problem, [0] * len(problem.length))
    with pytest.raises(ValueError, match="a root has no partition"):
        measure_cuts(problem, [-1] * len(problem.length))


def every_packing(loads: list[int], room: int, capacity: int) -> tuple[int, int]:
    """Fewest bins and then least kept, over every subset that stays and every set partition of the rest."""
    best = (len(loads) + 1, 0)
    for size in range(len(loads) + 1):
        for kept in combinations(range(len(loads)), size):
            stays = sum(loads[index] for index in kept)
            if stays <= room:
                fills: set[tuple[int, ...]] = {()}
                for index in set(range(len(loads))) - set(kept):
                    fills = {
                        tuple(sorted((*fill[:place], fill[place] + loads[index], *fill[place + 1 :])))
                        for fill in ((*known, 0) for known in fills)
                        for place in range(len(fill))
                        if fill[place] + loads[index] <= capacity
                    }
                    fills = {tuple(load for load in fill if load) for fill in fills}
                best = min(best, (min(len(fill) for fill in fills), stays))
    return best


@pytest.mark.parametrize(("least", "most"), [(1, 6), (8, 60)], ids=["few", "many"])
@given(data=st.data(), capacity=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_loads_are_packed_within_their_room_and_few_optimally(least, most, data, capacity):
    loads = data.draw(st.lists(st.integers(1, capacity), min_size=least, max_size=most))
    room = data.draw(st.integers(0, capacity - 1))
    bins, proven = pack_loads(loads, room, capacity)
    packed = [index for content in bins for index in content]
    found = (len(bins), sum(loads) - sum(loads[index] for index in packed))
    assert len(set(packed)) == len(packed) and found[1] <= room
    assert all(0 < sum(loads[index] for index in content) <= capacity for content in bins)
    assert bound_bins(loads, room, capacity) <= found
    assert most > 6 or (proven and found == every_packing(loads, room, capacity))


@pytest.mark.parametrize(
    ("loads", "room", "bins", "kept", "is_proven"),
    [
        ([6] * 9, 0, 9, 0, True),
        ([6] * 9, 6, 8, 6, False),
        ([4] * 12, 0, 6, 0, False),
        ([5] * 20, 5, 10, 0, True),
        ([5] * 21, 5, 10, 5, True),
        ([9, 1] * 6, 0, 6, 0, True),
        ([7, 2, 2] * 4, 9, 4, 8, False),
    ],
)
def test_many_equal_loads_are_packed_as_few_would_be(loads, room, bins, kept, is_proven):
    found, proven = pack_loads(loads, room, 10)
    left = sum(loads) - sum(loads[index] for content in found for index in content)
    assert (len(found), left, proven) == (bins, kept, is_proven)


def test_a_star_needs_no_solver():
    plan = plan_partitions(Forest.from_rows([[0] * 50 + [branch] * 60 for branch in range(1, 30)]), 100)
    assert (plan.num_partitions, plan.relayed_tokens, plan.depth) == (30, 1_450, 2)
    assert (plan.solver, plan.is_optimal) == ("heuristic", True)


def test_an_unproven_packing_claims_no_proof():
    forest = Forest.from_rows([[0] * 50 + [branch] * 40 for branch in range(1, 30)])
    for plan in (plan_partitions(forest, 100), plan_partitions(forest, 100, solver="heuristic")):
        assert (plan.num_partitions, plan.lower_bound, plan.is_optimal) == (15, 13, False)
