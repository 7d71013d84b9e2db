"""Causes of branching, each on the smallest forest that shows it."""

import numpy as np
import pytest

from tree_rl.tree import Forest, Jagged
from tree_rl.tree.report.branching import BranchCause, classify_branches

FORK, END = [[1, 2], [1, 5]], (0, None, BranchCause.PREFIX_END)
CASES = {
    "both sampled": (FORK, [[0, 1], [0, 1]], [(0, 2, BranchCause.SAMPLING)]),
    "one sampled": ([[1, 2, 6], [1, 6, 6]], [[0, 1, 1], [0, 0, 1]], [(0, 2, BranchCause.CONTEXT_EDIT)]),
    "none sampled": (FORK, [[0, 0], [0, 0]], [(0, 2, BranchCause.OBSERVATION)]),
    "no mask": (FORK, None, [(0, 2, BranchCause.UNKNOWN)]),
    "a row that ends where others go on": ([[1, 2], [1, 2, 5], [1, 2]], None, [END]),
    "sampled in one row of two": (
        [[1, 2], [1, 2, 6], [1, 5]], [[0, 1], [0, 0, 1], [0, 1]],
        [(0, 3, BranchCause.SAMPLING), (1, None, BranchCause.PREFIX_END)],
    ),
    "every child but the heaviest": (
        [[1, 2, 2], [1, 5], [1, 6], [3], [4]], None, [(0, child, BranchCause.UNKNOWN) for child in (2, 3)],
    ),
    "no rows": ([], None, []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_branch_has_its_cause(case):
    rows, sampled, expected = CASES[case]
    mask = None if sampled is None else Jagged.from_rows([np.array(row) for row in sampled])
    branches = classify_branches(Forest.from_rows(rows), sampled=mask)
    assert [(branch.segment, branch.child, branch.cause) for branch in branches] == expected


def test_a_mask_of_other_rows_is_refused():
    with pytest.raises(ValueError, match="one entry per row token"):
        classify_branches(Forest.from_rows([[1, 2]]), sampled=Jagged.from_rows([np.array([1])]))
