"""Leave-one-out over sibling subtrees: hand-worked trees and laws."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worked_trees import groups, tree_of

from tree_rl.credit.by_node import tree_loo


def credit_of_tokens(
    rows: Sequence[Sequence[int]], sessions: Sequence[int], outcomes: Sequence[float]
) -> list[list[float]]:
    """Credit of each token of each row."""
    tree = tree_of(rows, outcomes, leaf_of_row=sessions)
    return [np.round(row, 9).tolist() for row in tree.forest.row_index.with_values(tree_loo(tree))]


def test_independent_sessions_have_the_leave_one_out_advantage() -> None:
    # Prompt 1; outcomes 1, 0, 0.5. RLOO: 1 - 0.25, 0 - 0.75, 0.5 - 0.5.
    credit = credit_of_tokens([[1, 2, 3], [1, 4], [1, 5, 6]], [0, 1, 2], [1.0, 0.0, 0.5])
    assert credit == [[0, 0.75, 0.75], [0, -0.75], [0, 0.0, 0.0]]


def test_three_subtrees_of_different_size() -> None:
    # 1 -> 2 -> {6, 7, 8} (0, 1, 1), 1 -> 3 (1), 1 -> 4 (0).
    # Segment 2: 2/3 - 1/2 = 1/6. 3: 1 - (0 + 1 + 1 + 0) / 4 = 1/2. 4: 0 - 3/4. Leaves: 0 - 1, 1 - 1/2, 1 - 1/2.
    rows = [[1, 2, 6], [1, 2, 7], [1, 2, 8], [1, 3], [1, 4]]
    credit = credit_of_tokens(rows, [0, 1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0, 0.0])
    sixth = round(1 / 6, 9)
    assert credit == [[0, sixth, -1.0], [0, sixth, 0.5], [0, sixth, 0.5], [0, 0.5], [0, -0.75]]


def test_a_fork_inside_one_session_below_a_token_that_two_sessions_share() -> None:
    # Token 2 is shared by both sessions; session 0 goes on in two rows, session 1 in one; session 2 went elsewhere.
    rows = [[1, 2, 3, 8], [1, 2, 3, 9], [1, 2, 4], [1, 5]]
    credit = credit_of_tokens(rows, [0, 0, 1, 2], [1.0, 0.0, 1.0])
    assert credit == [[0, -0.5, 1, 1], [0, -0.5, 1, 1], [0, -0.5, -1], [0, 0.5]]


def test_a_sub_agent_with_a_prompt_of_its_own_has_its_sessions_credit() -> None:
    rows = [[1, 2], [900, 3], [1, 4]]
    assert credit_of_tokens(rows, [0, 0, 1], [1.0, 0.0]) == [[0, 1], [1, 1], [0, -1]]


def test_a_session_that_ends_where_another_goes_on() -> None:
    credit = credit_of_tokens([[1, 2], [1, 2, 3]], [0, 1], [1.0, 0.0])
    assert credit == [[0, 0], [0, 0, -1]]


@settings(max_examples=60, deadline=None)
@given(groups())
def test_credit_is_relative_and_linear(group: tuple[list[list[int]], list[int], list[float]]) -> None:
    rows, sessions, outcomes = group
    credit = credit_of_tokens(rows, sessions, outcomes)
    assert all(value == 0 for values in credit for value in values[:1]), "the prompt is everybody's"
    shifted = credit_of_tokens(rows, sessions, [3 * outcome + 7 for outcome in outcomes])
    for ours, theirs in zip(credit, shifted, strict=True):
        np.testing.assert_allclose(theirs, 3 * np.array(ours), atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(groups())
def test_weighted_by_who_stays_and_who_leaves_the_credits_of_a_fork_sum_to_zero(
    group: tuple[list[list[int]], list[int], list[float]],
) -> None:
    # One row per session: with k of n sessions in a child, the sum of k (n - k) credit over children and ends.
    rows, sessions, outcomes = group
    first = [sessions.index(session) for session in range(max(sessions) + 1)]
    rows = [rows[index] for index in first]
    tree = tree_of(rows, outcomes)
    credit_V = np.zeros(len(tree.parent_V))
    credit_V[tree.node_F] = tree_loo(tree)
    passes_VP = tree.passes_VP
    for parent in range(len(credit_V)):
        children = np.flatnonzero(tree.parent_V == parent)
        here = int(passes_VP[parent].sum())
        total = sum(passes_VP[c].sum() * (here - passes_VP[c].sum()) * credit_V[c] for c in children)
        for session in np.flatnonzero(passes_VP[parent] & ~passes_VP[children].any(axis=0)):
            others = [o for o in np.flatnonzero(passes_VP[parent]) if o != session]
            if others:
                total += (here - 1) * (outcomes[session] - np.mean([outcomes[o] for o in others]))
        assert total == pytest.approx(0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(groups(), st.integers(1, 3))
def test_identical_branches_change_no_credit(
    group: tuple[list[list[int]], list[int], list[float]], copies: int
) -> None:
    rows, sessions, outcomes = group
    once = credit_of_tokens(rows, sessions, outcomes)
    assert credit_of_tokens(rows * copies, sessions * copies, outcomes) == once * copies
