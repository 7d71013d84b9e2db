"""Causes of branching, each on the smallest forest that shows it."""

import numpy as np
import pytest

from tree_rl.tree import Forest, Jagged
from tree_rl.tree.report.branching import BranchCause, classify_branches


@pytest.mark.parametrize(
    ("rows", "sampled", "cause"),
    [
        ([[1, 2], [1, 5]], [[0, 1], [0, 1]], BranchCause.SAMPLING),
        ([[1, 2, 6], [1, 6, 6]], [[0, 1, 1], [0, 0, 1]], BranchCause.CONTEXT_EDIT),
        ([[1, 2], [1, 5]], [[0, 0], [0, 0]], BranchCause.OBSERVATION),
        ([[1, 2], [1, 5]], None, BranchCause.UNKNOWN),
    ],
)
def test_the_cause_of_one_branch(rows, sampled, cause):
    mask = None if sampled is None else Jagged.from_rows([np.array(row) for row in sampled])
    assert [branch.cause for branch in classify_branches(Forest.from_rows(rows), sampled=mask)] == [cause]


def test_a_row_that_ends_where_others_go_on():
    branches = classify_branches(Forest.from_rows([[1, 2], [1, 2, 5], [1, 2]]))
    assert [(branch.segment, branch.child, branch.cause) for branch in branches] == [(0, None, BranchCause.PREFIX_END)]


def test_a_token_sampled_in_any_row_counts_as_sampled():
    rows = [[1, 2, 6], [1, 2, 6, 6], [1, 5]]
    mask = Jagged.from_rows([np.array(row) for row in ([0, 1, 1], [0, 0, 0, 1], [0, 1])])
    branches = classify_branches(Forest.from_rows(rows), sampled=mask)
    assert sorted(branch.cause for branch in branches) == [BranchCause.PREFIX_END, BranchCause.SAMPLING]


def test_every_child_but_the_heaviest_is_a_branch():
    forest = Forest.from_rows([[1, 2, 2], [1, 5], [1, 6], [3], [4]])
    branches = classify_branches(forest)
    assert [branch.child for branch in branches] == [2, 3]
    assert {branch.segment for branch in branches} == {0}


def test_a_mask_of_other_rows_is_refused():
    with pytest.raises(ValueError, match="one entry per row token"):
        classify_branches(Forest.from_rows([[1, 2]]), sampled=Jagged.from_rows([np.array([1])]))


def test_no_rows_have_no_branches():
    assert classify_branches(Forest.from_rows([])) == ()
