"""What a step counts of its calls, and that ranks which tell each other the same learn the same."""

import numpy as np

from tree_rl.cost.cost_fit import LEAST_EQUATIONS, Work
from tree_rl.cost.cost_model import CostModel, ModelShape
from tree_rl.training import Rows
from tree_rl.training.measured_calls import MeasuredCall, MeasuredCalls, work_of
from tree_rl.training.plan_cache import PlanCache
from tree_rl.training.planner import plan_micro_batches
from tree_rl.training.tree_options import TreeOptions

SHAPE = ModelShape(hidden=64, layers=2, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=100)


def test_work_is_that_of_the_trees_and_of_rows_without_one() -> None:
    ids = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [9, 8]]
    trained = [np.array([0, 0, 0, 1, 1]), np.array([0, 0, 0, 1]), np.array([0, 1])]
    rows = Rows.of(ids, trained=trained, groups=[0, 0, 1])
    trees = plan_micro_batches(rows, TreeOptions(mode="tree"), 100, 100, None, PlanCache())
    # Heads at tokens 3, 4 and 9: the edges 3-4 and 3-6 share theirs.
    assert work_of(rows, trees) == Work(forwards=1, tokens=8, pairs=1 + 2 + 3 + 4 + 5 + 4 + 1 + 2, head_tokens=3)
    apart = Rows.of([[1, 2, 3], [4, 5]], trained=[np.array([0, 0, 1]), np.array([0, 1])], groups=[0, 0])
    cost = CostModel(per_token=1.0, per_pair=1.0)
    flat = plan_micro_batches(apart, TreeOptions(mode="auto"), 100, 100, cost, PlanCache())
    assert [batch.forest for batch in flat] == [None]
    assert work_of(apart, flat) == Work(forwards=1, tokens=5, pairs=6 + 3, head_tokens=5)


def call(tokens: float, seconds: float) -> MeasuredCall:
    return Work(forwards=1, tokens=tokens, pairs=tokens * 9, head_tokens=tokens / 2), seconds


def test_ranks_learn_the_slowest_ones_work_alike() -> None:
    ranks = [MeasuredCalls(SHAPE) for _ in range(3)]
    for number in range(LEAST_EQUATIONS):
        told = [call(100 + number, 2.0), call(50, 2.1), call(400 + 10 * number, 1.9)]
        for rank in ranks:
            rank.learn(told)
    models = [rank.model for rank in ranks]
    assert models[0] == models[1] == models[2] == ranks[0].fitted is not None
    # 420 tokens took 2.1 seconds; the next call is judged by what was known before it.
    predicted = ranks[0].fitted.step(420, 420 * 9, 210) + ranks[0].fitted.per_forward
    assert abs(predicted - 2.1) < 0.1 and ranks[0].error is None
    ranks[0].learn([call(420, 3.0), call(50, 1.0)])
    assert ranks[0].error is not None and abs(ranks[0].error - (1 - predicted / 3.0)) < 1e-12


def test_a_rank_that_measured_nothing_makes_no_equation() -> None:
    calls = MeasuredCalls(SHAPE)
    for _ in range(2 * LEAST_EQUATIONS):
        calls.learn([call(100, 1.0), None])
        calls.learn([None])
    assert calls.fitted is None and calls.error is None and calls.model == SHAPE.cost


def test_repeatable_runs_learn_and_let_no_time_decide() -> None:
    calls = MeasuredCalls(SHAPE, decides=False)
    for number in range(LEAST_EQUATIONS):
        calls.learn([call(400 + 10 * number, 2.0)])
    assert calls.fit is not None and calls.fit.model is not None
    assert calls.fitted is None and calls.model == SHAPE.cost


def test_a_call_is_told_once() -> None:
    calls, rows = MeasuredCalls(SHAPE), Rows.of([[1, 2]], trained=[np.array([0, 1])])
    batches = plan_micro_batches(rows, TreeOptions(mode="tree"), 9, 9, None, PlanCache())
    calls.note(rows, batches, 1.0, 3.5)
    taken = calls.take_last()
    assert taken is not None and taken[1] == 2.5 and calls.take_last() is None
