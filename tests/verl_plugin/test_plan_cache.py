"""A forest is planned once while its plan is remembered, and a plan is never taken for another forest's."""

from typing import Any

import numpy as np
import pytest

from tree_rl.training import plan_cache
from tree_rl.training.plan_cache import PlanCache
from tree_rl.tree.forest import Forest
from tree_rl.tree.partition import plan_partitions


def forest(branches: int, seed: int = 0, trunk: int = 10) -> Forest:
    draw = np.random.default_rng(seed)
    prefix = draw.integers(1, 90, trunk)
    return Forest.from_rows([np.concatenate([prefix, [100 + i], draw.integers(1, 90, 6)]) for i in range(branches)])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def counting(forest: Forest, max_tokens: int, **options: Any) -> object:
        calls.append(max_tokens)
        return plan_partitions(forest, max_tokens, **options)

    monkeypatch.setattr(plan_cache, "plan_partitions", counting)
    return calls


def test_a_forest_of_the_same_shape_is_planned_once(made: list[int]) -> None:
    plans = PlanCache()
    first = plans.plan(forest(3, seed=0), 12)
    assert plans.plan(forest(3, seed=1), 12) is first
    assert made == [12]


def test_another_shape_or_budget_is_planned_anew(made: list[int]) -> None:
    plans = PlanCache()
    for tree, budget in ((forest(3), 12), (forest(3), 13), (forest(4), 12), (forest(3, trunk=9), 12)):
        expected = plan_partitions(tree, budget)
        assert [p.tokens.tolist() for p in plans.plan(tree, budget).partitions] == [
            p.tokens.tolist() for p in expected.partitions
        ]
    assert made == [12, 13, 12, 12]


def test_the_least_recently_used_plan_is_forgotten_first(made: list[int]) -> None:
    tree = forest(3)
    plans = PlanCache(most_tokens=2 * tree.num_unique)
    for budget in (10, 11, 10, 12, 10, 11):
        plans.plan(tree, budget)
    assert made == [10, 11, 12, 11]
