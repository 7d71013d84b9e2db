"""A forest is planned once while its plan is remembered, and a plan is never taken for another forest's."""

from unittest.mock import Mock

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
def planned(monkeypatch: pytest.MonkeyPatch) -> Mock:
    counted = Mock(wraps=plan_partitions)
    monkeypatch.setattr(plan_cache, "plan_partitions", counted)
    return counted


def test_a_shape_is_planned_once_for_each_budget(planned: Mock) -> None:
    plans = PlanCache()
    for tree, budget in ((forest(3), 12), (forest(3), 13), (forest(4), 12), (forest(3, trunk=9), 12)):
        expected = plan_partitions(tree, budget).partition_of_token
        assert plans.plan(tree, budget).partition_of_token.tolist() == expected.tolist()
    assert planned.call_count == 4
    assert plans.plan(forest(3, seed=1), 12) is plans.plan(forest(3), 12)
    assert planned.call_count == 4


def test_the_least_recently_used_plan_is_forgotten_first(planned: Mock) -> None:
    tree = forest(3)
    plans = PlanCache(most_tokens=2 * tree.num_unique)
    for budget in (10, 11, 10, 12, 10, 11):
        plans.plan(tree, budget)
    assert [call.args[1] for call in planned.call_args_list] == [10, 11, 12, 11]
