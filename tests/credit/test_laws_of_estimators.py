"""Laws that every estimator keeps, on random trees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worked_trees import CONTEXT, groups, tree_of

from tree_rl.credit import ESTIMATORS, CreditRow, CreditTree, Leaf, normalise, whiten

Group = tuple[list[list[int]], list[int], list[float]]
CASES = [
    *((name, {}) for name in ("treepo", "treerl", "branpo", "vine", "tree_loo", "spo")),
    *(("tree_grpo", {"variant": variant}) for variant in ("tree", "tree_2norm", "tree_inner", "tree_per_token")),
    *((name, {"states": "observation"}) for name in ("gigpo", "rtmc")),
    ("rtmc", {"states": "observation", "smooth": "state"}),
]
SHIFTED = [case for case in CASES if case[0] not in ("gigpo", "rtmc") and case[1].get("variant") != "tree_per_token"]
"""Discounts, and tokens without a reward, tell equal outcomes apart."""


def built(group: Group, order: list[int] | None = None) -> CreditTree:
    """Each token behind the prompt becomes a call that generates two; rows of a session share calls by context."""
    rows, sessions, outcomes = group
    number_of_call: dict[tuple[int, ...], int] = {}
    made = []
    for row, leaf in zip(rows, sessions, strict=True):
        calls = [number_of_call.setdefault((leaf, *row[:end]), len(number_of_call)) for end in range(2, len(row) + 1)]
        tokens = np.array([row[0], *(half for token in row[1:] for half in (token, token + 10))])
        made.append(CreditRow(tokens=tokens, leaf=leaf, steps=np.array([CONTEXT, *np.repeat(calls, 2)])))
    picked = made if order is None else [made[index] for index in order]
    return CreditTree.of(picked, [Leaf(reward=reward) for reward in outcomes])


def credit(name: str, tree: CreditTree, options: dict[str, str]) -> list[np.ndarray]:
    return list(tree.forest.row_index.with_values(ESTIMATORS[name].credit(tree, **options)))


@pytest.mark.parametrize("name, options", CASES)
@settings(max_examples=10, deadline=None)
@given(group=groups(), seed=st.integers(0, 99))
def test_credit_is_finite_in_any_order_of_rows_and_constant_over_a_nodes_and_a_steps_tokens(
    name: str, options: dict[str, str], group: Group, seed: int
) -> None:
    tree, order = built(group), np.random.default_rng(seed).permutation(len(group[0])).tolist()
    by_row = credit(name, tree, options)
    assert all(np.isfinite(row).all() for row in by_row)
    for place, got in zip(order, credit(name, built(group, order), options), strict=True):
        np.testing.assert_allclose(got, by_row[place], atol=1e-9)
    if options.get("variant") == "tree_per_token":
        return
    step_of = tree.forest.row_index.with_values(tree.steps.step_F)
    for row, values in enumerate(by_row):
        for _, start, end in tree.path(row):
            for step in set(step_of[row][start:end].tolist()) - {CONTEXT}:
                assert np.ptp(values[start:end][step_of[row][start:end] == step]) == 0


@pytest.mark.parametrize("name, options", SHIFTED)
@settings(max_examples=10, deadline=None)
@given(group=groups())
def test_equal_outcomes_teach_nothing_and_a_shift_of_all_changes_nothing(
    name: str, options: dict[str, str], group: Group
) -> None:
    rows, sessions, outcomes = group
    same = credit(name, built((rows, sessions, [0.25] * len(outcomes))), options)
    assert max(np.abs(row).max() for row in same) < 1e-6
    if name == "branpo":  # it asks whether half of the prompt's outcomes are good
        options = {**options, "solved_from": -1e9}  # type: ignore[dict-item]
    shifted = credit(name, built((rows, sessions, [7 + outcome for outcome in outcomes])), options)
    for ours, theirs in zip(credit(name, built(group), options), shifted, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.parametrize("name, options", CASES)
@settings(max_examples=10, deadline=None)
@given(reward=st.floats(-2, 2), tokens=st.lists(st.integers(1, 3), min_size=2, max_size=5))
def test_a_session_alone_has_no_credit(name: str, options: dict[str, str], reward: float, tokens: list[int]) -> None:
    if options.get("variant") == "tree_per_token" or options.get("smooth") == "state":
        return  # several tokens make a group; the prompt's mean is not that of discounted returns
    (values,) = credit(name, tree_of([[0, *tokens]], [reward]), options)
    expected = reward if name == "tree_loo" else 0.0
    np.testing.assert_allclose(values[1:], expected, atol=1e-9)


@pytest.mark.parametrize("name, options", CASES)
@settings(max_examples=10, deadline=None)
@given(group=groups(), copies=st.integers(2, 3))
def test_a_leaf_that_stands_for_several_counts_as_many(
    name: str, options: dict[str, str], group: Group, copies: int
) -> None:
    rows, sessions, outcomes = group
    rows = [rows[sessions.index(session)] for session in range(len(outcomes))]
    many = tree_of([*[rows[0]] * copies, *rows[1:]], [*[outcomes[0]] * copies, *outcomes[1:]])
    one = tree_of(rows, outcomes, leaves=[{"multiplicity": copies}, *[{}] * (len(rows) - 1)])
    expected = credit(name, many, options)
    for ours, theirs in zip(credit(name, one, options), [expected[0], *expected[copies:]], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize("name, options", [("gigpo", {}), ("rtmc", {}), ("rtmc", {"smooth": "state"})])
@pytest.mark.parametrize("states", [[], ["s"] * 9])
@settings(max_examples=10, deadline=None)
@given(group=groups(), copies=st.integers(2, 3))
def test_so_does_one_with_reported_states_or_states_of_its_own(
    name: str, options: dict[str, str], states: list[str], group: Group, copies: int
) -> None:
    rows, sessions, outcomes = group
    rows = [rows[sessions.index(session)] for session in range(len(outcomes))]
    first, others = {"states": states}, [{"states": ["s"] * 9}] * (len(rows) - 1)
    tokens, rewards = [*[rows[0]] * copies, *rows[1:]], [*[outcomes[0]] * copies, *outcomes[1:]]
    expected = credit(name, tree_of(tokens, rewards, leaves=[*[first] * copies, *others]), options)
    one = tree_of(rows, outcomes, leaves=[{**first, "multiplicity": copies}, *others])
    for ours, theirs in zip(credit(name, one, options), [expected[0], *expected[copies:]], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize("name, options", CASES)
@settings(max_examples=10, deadline=None)
@given(group=groups(), reward=st.floats(-5, 5))
def test_the_outcome_of_a_leaf_without_weight_moves_no_other_leaf(
    name: str, options: dict[str, str], group: Group, reward: float
) -> None:
    rows, sessions, outcomes = group
    rows = [rows[sessions.index(session)] for session in range(len(outcomes))]
    leaves = [{"weight": 0.0}, *[{}] * (len(rows) - 1)]
    runs = [credit(name, tree_of(rows, [first, *outcomes[1:]], leaves=leaves), options) for first in (0.0, reward)]
    own = {tuple(rows[0][: end + 1]) for end in range(len(rows[0]))}
    for row, ours, theirs in zip(rows[1:], runs[0][1:], runs[1][1:], strict=True):
        if tuple(row) not in own:
            np.testing.assert_allclose(ours, theirs, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(group=groups(), copies=st.integers(2, 3))
def test_tree_loo_is_linear_and_nothing_on_the_prompt_and_identical_branches_do_not_matter(
    group: Group, copies: int
) -> None:
    rows, sessions, outcomes = group
    once = credit("tree_loo", tree_of(rows, outcomes, leaf_of_row=sessions), {})
    assert all(values[0] == 0 for values in once)
    scaled = [3 * outcome + 7 for outcome in outcomes]
    for ours, theirs in zip(once, credit("tree_loo", tree_of(rows, scaled, leaf_of_row=sessions), {}), strict=True):
        np.testing.assert_allclose(theirs, 3 * ours, atol=1e-7)
    more = credit("tree_loo", tree_of(rows * copies, outcomes, leaf_of_row=sessions * copies), {})
    for ours, theirs in zip(once * copies, more, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(group=groups())
def test_weighted_by_who_stays_and_who_leaves_tree_loos_credits_of_a_fork_sum_to_zero(group: Group) -> None:
    # One row per session: with k of n sessions in a child, the sum of k (n - k) credit over children and ends.
    rows, sessions, outcomes = group
    tree = tree_of([rows[sessions.index(session)] for session in range(len(outcomes))], outcomes)
    credit_V = np.zeros(len(tree.parent_V))
    credit_V[tree.node_F] = ESTIMATORS["tree_loo"].credit(tree)
    passes_VP = tree.passes_VP
    for parent in range(len(credit_V)):
        children = np.flatnonzero(tree.parent_V == parent)
        here = int(passes_VP[parent].sum())
        total = sum(passes_VP[c].sum() * (here - passes_VP[c].sum()) * credit_V[c] for c in children)
        for session in np.flatnonzero(passes_VP[parent] & ~passes_VP[children].any(axis=0)):
            others = [outcomes[o] for o in np.flatnonzero(passes_VP[parent]) if o != session]
            total += (here - 1) * (outcomes[session] - np.mean(others)) if others else 0
        assert total == pytest.approx(0, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-3, 3), min_size=2, max_size=12), seed=st.integers(0, 99))
def test_a_group_is_centred_and_scaled(values: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 3, len(values))
    found = normalise(np.array(values), group)
    for one in np.unique(group):
        inside, given = found[group == one], np.array(values)[group == one]
        assert abs(inside.mean()) < 1e-6
        if len(inside) == 1:
            assert inside[0] == 0
        elif given.std(ddof=1) > 1e-2:
            assert inside.std(ddof=1) == pytest.approx(1, abs=1e-3)


def test_whitening_counts_a_token_by_its_share() -> None:
    values = np.array([1.0, 1.0, 4.0, 7.0])
    shared = whiten(values, np.array([0.5, 0.5, 1.0, 0.0]))
    # Two tokens, 1 and 4: mean 2.5, deviation sqrt(4.5).
    np.testing.assert_allclose(shared[:3], [-0.7071067, -0.7071067, 0.7071067], atol=1e-6)
    assert whiten(values[:1], np.ones(1)).tolist() == [0]
