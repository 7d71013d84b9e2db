"""Laws of every plan: each token once, connected, within the budget, past equal to the path, one path alive."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest
from tree_rl.tree.partition import PartitionPlan, plan_partitions

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), max_size=12)
HOSTILE = {
    "no rows": [],
    "one token": [[7]],
    "identical rows": [[1, 2, 3, 4]] * 3,
    "strict prefixes": [[1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]],
    "no common root": [[1, 1], [2], [3, 3, 3], [4]],
    "single-token rows": [[token] for token in range(9)],
    "one long row": [list(range(130))],
    "long row and its branch": [list(range(130)), [*range(65), 500, 501], [*range(65), 502]],
    "branch at 63": [list(range(70)), [*range(63), 99, 98]],
    "branch at 64": [list(range(70)), [*range(64), 99, 98]],
    "branch at 65": [list(range(70)), [*range(65), 99, 98]],
    "star": [[0, branch, branch] for branch in range(1, 40)],
    "comb": [[0] * tooth + [1] for tooth in range(1, 40)],
    "binary": [[number >> bit & 1 for bit in range(6)] for number in range(64)],
}


def path_to(forest: Forest, token: int) -> list[int]:
    path = []
    while token >= 0:
        path.append(token)
        token = int(forest.parent[token])
    return path[::-1]


def check_partition(forest: Forest, plan: PartitionPlan, number: int, budget: int) -> None:
    part = plan.partitions[number]
    past = path_to(forest, part.cut_token)
    assert 1 <= part.num_tokens <= budget
    assert (np.diff(part.tokens) > 0).all()
    assert (plan.partition_of_token[part.tokens] == number).all()
    assert plan.local_index[part.tokens].tolist() == list(range(part.num_tokens))
    assert part.position.tolist() == forest.position[part.tokens].tolist()
    assert part.past_length == len(past)
    assert part.parent == (plan.partition_of_token[part.cut_token] if past else -1) < number
    for local, token in enumerate(part.tokens.tolist()):
        seen = [int(part.tokens[other]) for other in range(local + 1) if local < part.local_subtree_end[other]]
        assert past + seen == path_to(forest, token)
        above, segment = int(forest.parent[token]), forest.segment_of_token[token]
        if above < 0 or plan.partition_of_token[above] != number:
            assert above == part.cut_token, "a partition hangs below one cut"
            assert token == forest.segments.start[segment] or forest.segments.lengths[segment] > plan.capacity_tokens
    assert [cut.token for cut in part.cuts] == sorted({p.cut_token for p in plan.partitions if p.parent == number})
    for cut in part.cuts:
        assert part.tokens[cut.local_token] == cut.token
        assert past + part.tokens[cut.path].tolist() == path_to(forest, cut.token)


def check_ops(plan: PartitionPlan) -> None:
    forwards = [number for kind, number in plan.ops if kind == "forward"]
    backwards = [number for kind, number in plan.ops if kind == "backward"]
    assert forwards == sorted(backwards) == list(range(plan.num_partitions))
    live: list[int] = []
    peak_graphs = peak_tokens = 0
    for kind, number in plan.ops:
        if kind == "forward":
            assert plan.partitions[number].parent == (live[-1] if live else -1)
            live.append(number)
        else:
            assert live.pop() == number
        peak_graphs = max(peak_graphs, len(live))
        peak_tokens = max(peak_tokens, sum(plan.partitions[other].num_tokens for other in live))
    assert not live
    assert (peak_graphs, peak_tokens) == (plan.depth, plan.peak_live_tokens)


def check(forest: Forest, plan: PartitionPlan, budget: int) -> None:
    assert sorted(int(token) for part in plan.partitions for token in part.tokens) == list(range(forest.num_unique))
    for number in range(plan.num_partitions):
        check_partition(forest, plan, number, budget)
    check_ops(plan)
    assert plan.relayed_tokens == sum(part.past_length for part in plan.partitions)
    assert -(-forest.num_unique // plan.capacity_tokens) <= plan.lower_bound <= plan.num_partitions
    assert plan.utilisation * plan.num_partitions * plan.capacity_tokens == pytest.approx(forest.num_unique)


@pytest.mark.parametrize("solver", ["heuristic", "cp_sat"])
@given(rows=ROWS, budget=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_every_plan_keeps_every_law(solver, rows, budget):
    forest = Forest.from_rows(rows)
    check(forest, plan_partitions(forest, budget, solver=solver, time_limit_s=1.0), budget)


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shapes_are_ordinary(name, budget):
    forest = Forest.from_rows(HOSTILE[name])
    check(forest, plan_partitions(forest, budget, solver="heuristic"), budget)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_fits_is_one_partition(name):
    forest = Forest.from_rows(HOSTILE[name])
    plan = plan_partitions(forest, max(forest.num_unique, 1))
    assert plan.num_partitions == min(forest.num_rows, 1)
    assert (plan.relayed_tokens, plan.is_optimal, plan.utilisation) == (0, True, 1.0)


def test_a_long_segment_is_a_chain_with_its_rest_on_top():
    plan = plan_partitions(Forest.from_rows([list(range(23))]), 10)
    assert [part.num_tokens for part in plan.partitions] == [3, 10, 10]
    assert [part.past_length for part in plan.partitions] == [0, 3, 13]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"max_tokens": 4, "time_limit_s": -1.0}, "time_limit_s"),
        ({"max_tokens": 4, "time_limit_s": float("nan")}, "time_limit_s"),
        ({"max_tokens": 4, "solver": "greedy"}, "solver: expected auto, heuristic or cp_sat, received 'greedy'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_partitions(Forest.from_rows([[1, 2]]), **arguments)
