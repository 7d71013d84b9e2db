"""The cost model that is fitted to measured updates: it finds what made them, and stays sober where they say little."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tree_rl.cost.cost_fit import LEAST_EQUATIONS, MOST_EQUATIONS, CostFit, Work
from tree_rl.cost.cost_model import CostModel
from tree_rl.cost.model_sizes import MODEL_SIZES

START = MODEL_SIZES["8b"].shape.cost
RATE = 4e14
"""Floating point operations a second."""


def draw_work(draw: np.random.Generator) -> Work:
    tokens, forwards = draw.uniform(2e3, 2e5), float(draw.integers(1, 8))
    pairs, head_tokens = tokens * draw.uniform(500, 40_000), tokens * draw.uniform(0.05, 1.0)
    return Work(forwards=forwards, tokens=tokens, pairs=pairs, head_tokens=head_tokens)


def seconds_of(model: CostModel, work: Work) -> float:
    return model.per_forward * work.forwards + model.step(work.tokens, work.pairs, work.head_tokens)


def machine(factors: tuple[float, ...], per_forward: float) -> CostModel:
    """A GPU whose terms run at shares of the assumed rate."""
    names = ("per_token", "per_pair", "per_head_token")
    terms = {name: getattr(START, name) / (RATE * factor) for name, factor in zip(names, factors, strict=True)}
    return CostModel(per_forward=per_forward, **terms)


def vars_of(model: CostModel) -> list[float]:
    return [model.per_forward, model.per_token, model.per_pair, model.per_head_token]


def fitted(updates: int, draw: np.random.Generator, truth: CostModel, noise: float = 0.0, warm_up: int = 0) -> CostFit:
    """After updates that a machine ran, the first of them while it warmed up."""
    fit = CostFit(START)
    for number in range(updates):
        work = draw_work(draw)
        slower = draw.uniform(3, 20) if number < warm_up else 1.0
        fit.add(work, seconds_of(truth, work) * slower * (1 + noise * draw.normal()))
    return fit


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
    model = fitted(30, draw, truth, noise, warm_up=4).model
    assert model is not None
    errors = [abs(seconds_of(model, work) / seconds_of(truth, work) - 1) for work in map(draw_work, [draw] * 50)]
    assert np.median(errors) < 0.05


def test_coefficients_are_found_without_noise() -> None:
    truth = machine((0.5, 1.2, 0.8), 0.1)
    model = fitted(MOST_EQUATIONS, np.random.default_rng(0), truth).model
    assert model is not None and vars_of(model)[:3] == pytest.approx(vars_of(truth)[:3], rel=0.1)


def test_updates_that_are_all_alike_leave_the_shape_of_the_start() -> None:
    fit, work = CostFit(START), Work(forwards=2, tokens=1e5, pairs=1e9, head_tokens=3e4)
    for _ in range(20):
        fit.add(work, 7.0)
    model = fit.model
    assert model is not None and seconds_of(model, work) == pytest.approx(7.0, rel=0.02)
    assert model.per_pair / model.per_token == pytest.approx(START.per_pair / START.per_token, rel=0.25)


SINGULAR = [*[(1, 1.0, 1.0, 1.0, 71.0)] * 2, (1, 1.0, 1.0, 1.0, 125.0), (1, 3.0, 3.0, 2.0, 2.0)]
SINGULAR += [(1, 1.0, 692319542.0, 6774967.0, 0.25)]


@settings(max_examples=25, deadline=None)
@example(SINGULAR)
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
    fit, again = fitted(9, np.random.default_rng(1), machine((1, 1, 1), 0.01)), CostFit(START)
    again.restore(json.loads(json.dumps(fit.state())))
    assert again.model == fit.model is not None
