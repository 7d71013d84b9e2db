"""Trees that are small enough to work by hand, and random ones."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tree_rl.credit import CreditRow, CreditTree, Leaf

CONTEXT = -1


def tree_of(
    rows: Sequence[Sequence[int]],
    rewards: Sequence[float],
    *,
    leaf_of_row: Sequence[int] | None = None,
    steps: Sequence[Sequence[int]] | None = None,
    leaves: Sequence[dict[str, Any]] | None = None,
) -> CreditTree:
    """A leaf per row unless told otherwise; one call generates all tokens but the first."""
    owners = range(len(rows)) if leaf_of_row is None else leaf_of_row
    numbers = [[CONTEXT] + [0] * (len(row) - 1) for row in rows] if steps is None else steps
    given = [{}] * len(rewards) if leaves is None else leaves
    columns = zip(rows, owners, numbers, strict=True)
    made = [CreditRow(tokens=np.array(row), leaf=leaf, steps=np.array(one)) for row, leaf, one in columns]
    return CreditTree.of(made, [Leaf(reward=reward, **more) for reward, more in zip(rewards, given, strict=True)])


def credit_of(estimator: Callable[..., np.ndarray], tree: CreditTree, **options: Any) -> list[list[float]]:
    """Credit of each token of each row."""
    return [row.tolist() for row in tree.forest.row_index.with_values(estimator(tree, **options))]


def worked(rows: Sequence[Sequence[float]], *, error: float = 3e-5) -> list[Any]:
    """Numbers of five digits, to compare credit with; deviations have an epsilon."""
    return [pytest.approx(list(row), abs=error) for row in rows]


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[float]]:
    """Rows over few tokens, so that prefixes collide; one to three rows per session."""
    num_sessions = draw(st.integers(2, 5))
    rows, sessions = [], []
    for session in range(num_sessions):
        for _ in range(draw(st.integers(1, 3))):
            rows.append([0, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))])
            sessions.append(session)
    outcomes = draw(st.lists(st.integers(0, 8).map(lambda v: v / 8), min_size=num_sessions, max_size=num_sessions))
    return rows, sessions, outcomes
