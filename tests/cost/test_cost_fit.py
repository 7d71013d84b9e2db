"""The cost model that is fitted to measured updates: it finds what made them, and stays sober where they say little."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.cost.cost_fit import LEAST_EQUATIONS, MOST_EQUATIONS, CostFit, Work
from tree_rl.cost.cost_model import CostModel, ModelShape

SHAPE = ModelShape(hidden=4096, layers=36, intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936)
START = SHAPE.cost
RATE = 4e14
"""Floating point operations a second."""


def draw_work(draw: np.random.Generator) -> Work:
    tokens = draw.uniform(2e3, 2e5)
    forwards = draw.integers(1, 8)
    return Work(
        forwards=float(forwards),
        tokens=tokens,
        pairs=tokens * draw.uniform(500, 40_000),
        head_tokens=tokens * draw.uniform(0.05, 1.0),
    )


def seconds_of(model: CostModel, work: Work) -> float:
    return model.per_forward * work.forwards + model.step(work.tokens, work.pairs, work.head_tokens)


def machine(factors: tuple[float, ...], per_forward: float) -> CostModel:
    """A GPU whose terms run at shares of the assumed rate."""
    token, pair, head = (1 / (RATE * factor) for factor in factors)
    return CostModel(
        per_token=START.per_token * token,
        per_pair=START.per_pair * pair,
        per_head_token=START.per_head_token * head,
        per_forward=per_forward,
    )


@settings(max_examples=25, deadline=None)
@given(
    factors=st.tuples(*[st.floats(0.3, 1.6)] * 3),
    per_forward=st.floats(0.0, 0.2),
    seed=st.integers(0, 10**6),
    noise=st.floats(0.0, 0.03),
)
def test_updates_are_predicted_through_noise_and_warm_up(
    factors: tuple[float, ...], per_forward: float, seed: int, noise: float
) -> None:
    draw, truth = np.random.default_rng(seed), machine(factors, per_forward)
    fit = CostFit(START)
    for number in range(30):
        work = draw_work(draw)
        warm_up = draw.uniform(3, 20) if number < 4 else 1.0
        fit.add(work, seconds_of(truth, work) * warm_up * (1 + noise * draw.normal()))
    assert fit.model is not None
    assert min(vars_of(fit.model)) >= 0
    errors = [abs(seconds_of(fit.model, work) / seconds_of(truth, work) - 1) for work in map(draw_work, [draw] * 50)]
    assert np.median(errors) < 0.05


def vars_of(model: CostModel) -> list[float]:
    return [model.per_forward, model.per_token, model.per_pair, model.per_head_token]


def test_coefficients_are_found_without_noise() -> None:
    truth, draw = machine((0.5, 1.2, 0.8), 0.1), np.random.default_rng(0)
    fit = CostFit(START)
    for _ in range(MOST_EQUATIONS):
        work = draw_work(draw)
        fit.add(work, seconds_of(truth, work))
    assert fit.model is not None
    assert vars_of(fit.model)[:3] == pytest.approx(vars_of(truth)[:3], rel=0.1)


def test_updates_that_are_all_alike_leave_the_shape_of_the_start() -> None:
    fit, work = CostFit(START), Work(forwards=2, tokens=1e5, pairs=1e9, head_tokens=3e4)
    for _ in range(20):
        fit.add(work, 7.0)
    model = fit.model
    assert model is not None and seconds_of(model, work) == pytest.approx(7.0, rel=0.02)
    assert model.per_pair / model.per_token == pytest.approx(START.per_pair / START.per_token, rel=0.25)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), *[st.floats(1, 1e9)] * 3, st.floats(1e-4, 1e3)), max_size=80))
def test_whatever_was_measured_no_coefficient_is_negative(equations: list[tuple[Any, ...]]) -> None:
    fit = CostFit(START)
    for forwards, tokens, pairs, head, seconds in equations:
        fit.add(Work(forwards=forwards, tokens=tokens, pairs=pairs, head_tokens=head), seconds)
    assert (fit.model is None) == (len(equations) < LEAST_EQUATIONS)
    if fit.model is not None:
        assert np.isfinite(vars_of(fit.model)).all() and min(vars_of(fit.model)) >= 0


def test_a_rank_without_rows_teaches_nothing() -> None:
    fit = CostFit(START)
    for _ in range(10):
        fit.add(Work(forwards=0, tokens=0, pairs=0, head_tokens=0), 0.1)
        fit.add(Work(forwards=1, tokens=5, pairs=5, head_tokens=5), 0.0)
    assert fit.model is None


def test_a_checkpoint_keeps_what_was_learnt() -> None:
    draw, fit, again = np.random.default_rng(1), CostFit(START), CostFit(START)
    for _ in range(9):
        work = draw_work(draw)
        fit.add(work, seconds_of(machine((1, 1, 1), 0.01), work))
    again.restore(json.loads(json.dumps(fit.state())))
    assert again.model == fit.model is not None
