"""Groups in one mini-batch and, unless splitting is faster, on one rank; what a rank computes, and how even that is, is
proven in test_groups_split_over_ranks.py."""

import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.cost import CostModel
from tree_rl.cost.balance import batch
from tree_rl.cost.balance.batch import lay_out_groups, mini_batch_count, number_groups
from tree_rl.cost.balance.paths import GroupPaths
from tree_rl.tree import Forest

COST = CostModel(per_token=1.0, per_pair=0.0)

# What holds for every layout holds for the first ones that the search finds.
briefly = mock.patch.object(batch, "MOST_TRIALS", 600)


def star(rows: int, trunk: int, branch: int) -> GroupPaths:
    """A group of rows that share `trunk` tokens and have as many of their own."""
    return GroupPaths.of(Forest.from_rows([[1] * trunk + [2 + row] * branch for row in range(rows)]), COST)


def alone(costs: np.ndarray) -> list[GroupPaths]:
    """Groups of one row each."""
    return [star(1, 0, int(cost)) for cost in costs]


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[GroupPaths], int, int]:
    rows_of_group = draw(st.lists(st.integers(1, 7), min_size=1, max_size=12))
    group_of_row = np.repeat(np.arange(len(rows_of_group)), rows_of_group)
    draw(st.randoms(use_true_random=False)).shuffle(group_of_row)
    group_of_row = number_groups([str(group) for group in group_of_row])
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    paths = [star(rows, *generator.integers(1, 100, 2)) for rows in np.bincount(group_of_row)]
    return group_of_row, paths, draw(st.integers(1, 5)), draw(st.integers(1, 6))


@briefly
@settings(deadline=None, max_examples=25)
@given(batches())
def test_every_row_has_one_slot_and_every_group_one_mini_batch(
    drawn: tuple[np.ndarray, list[GroupPaths], int, int],
) -> None:
    group_of_row, paths, num_ranks, num_cells = drawn
    layout = lay_out_groups(group_of_row, paths, num_ranks=num_ranks, num_cells=num_cells)
    cells = layout.order.reshape(num_ranks, num_cells, -1)
    # verl hands every rank equally many rows and cuts them into equal mini-batches.
    assert sorted(layout.order) == list(range(cells.size))
    places: dict[int, set[tuple[int, int]]] = {}
    for (rank, cell, _), row in np.ndenumerate(cells):
        if row < len(group_of_row):
            places.setdefault(int(group_of_row[row]), set()).add((rank, cell))
    assert len(places) == len(paths)
    assert all(len({cell for _, cell in found}) == 1 for found in places.values())
    assert layout.split_groups == sum(len(found) > 1 for found in places.values())
    assert (cells < len(group_of_row)).sum(axis=2).max() == cells.shape[2]
    # With one unit a token, load beyond the whole groups' is what several ranks compute.
    whole = sum(one.whole for one in paths)
    np.testing.assert_allclose(layout.load_DC.sum(), whole + layout.repeated_tokens)
    np.testing.assert_array_equal(layout.tokens_DC, layout.load_DC)


@briefly
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_mini_batches_hold_the_configured_number_of_groups(groups: int, per_mini_batch: int, factor: int) -> None:
    steps = mini_batch_count(groups, per_mini_batch)
    layout = lay_out_groups(np.arange(groups), alone(np.ones(groups)), num_ranks=2, num_cells=steps * factor)
    cells = layout.order.reshape(2, steps, -1)
    groups_of_step = [(cells[:, step] < groups).sum() for step in range(steps)]
    assert max(groups_of_step) <= min(per_mini_batch, min(groups_of_step) + 1) and min(groups_of_step) >= 1


def test_a_group_beyond_the_mean_splits_where_that_saves_enough() -> None:
    group_of_row = np.repeat([0, 1, 2], [8, 1, 1])
    layout = lay_out_groups(group_of_row, [star(8, 10, 50), *alone(np.array([100, 100]))], num_ranks=3, num_cells=1)
    assert layout.split_groups == 1
    assert layout.repeated_tokens == 10 * (sum((layout.order.reshape(3, -1) < 8).any(axis=1)) - 1)
    assert layout.imbalance < 1.05
    # Here it would save one token of 502.
    assert lay_out_groups(np.zeros(2, dtype=int), [star(2, 500, 1)], num_ranks=3, num_cells=1).split_groups == 0


def test_a_group_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 3 groups: expected \[1, 1, 1\] rows, received \[1, 0, 1\]"):
        lay_out_groups(np.array([0, 2]), alone(np.ones(3)), num_ranks=1, num_cells=1)


def test_a_layout_costs_no_group_anew_for_each_of_the_others() -> None:
    paths, count = [star(1, 0, 1 + group % 97) for group in range(600)], 0
    cost = GroupPaths.cost

    def counted(group: GroupPaths, held: np.ndarray) -> float:
        nonlocal count
        count += 1
        return cost(group, held)

    with mock.patch.object(GroupPaths, "cost", counted):
        lay_out_groups(np.arange(600), paths, num_ranks=2, num_cells=1)
    assert count < 10 * len(paths)


def test_thousands_of_groups_are_placed_in_seconds() -> None:
    before = time.process_time()
    layout = lay_out_groups(np.arange(30_000), [star(1, 0, 5)] * 30_000, num_ranks=1, num_cells=1)
    assert layout.load_DC == 30_000 * 5
    assert time.process_time() - before < 15
