"""Packing and bins: every row once, within the budget, groups whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest
from tree_rl.tree.packing import best_fit, least_loaded, pack_groups

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=14)


def unique_tokens(forest: Forest, rows: np.ndarray) -> int:
    return len({int(token) for row in rows for token in forest.row_index[int(row)]})


@given(rows=ROWS, budget=st.integers(1, 40), num_groups=st.integers(1, 5), is_merged=st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_row_once_within_the_budget_in_whole_groups(rows, budget, num_groups, is_merged):
    groups = [list(range(number, len(rows), num_groups)) for number in range(num_groups)]
    merge_key = None if is_merged else [row % num_groups for row in range(len(rows))]
    forest = Forest.from_rows(rows, merge_key=merge_key)
    sizes = [unique_tokens(forest, np.array(group, int)) for group in groups]
    if max(sizes) > budget:
        with pytest.raises(ValueError, match="run it in partitions"):
            pack_groups(forest, groups, max_tokens=budget)
        return
    packed = pack_groups(forest, groups, max_tokens=budget)
    assert sorted(int(row) for batch in packed for row in batch) == list(range(len(rows)))
    for batch in packed:
        assert unique_tokens(forest, batch) <= budget
    for group in groups:
        holders = [batch for batch in packed if set(group) & set(batch.tolist())]
        assert len(holders) == bool(group)
    # Any two micro-batches of best fit decreasing overflow one bin, so at least every other one is half full.
    assert len(packed) <= 2 * -(-sum(sizes) // budget)
    assert sum(unique_tokens(forest, batch) for batch in packed) <= sum(sizes)


def test_small_groups_fill_few_even_micro_batches():
    rows = [[group] * 10 for group in range(8)]
    forest = Forest.from_rows(rows)
    packed = pack_groups(forest, [[row] for row in range(8)], max_tokens=30)
    assert [unique_tokens(forest, batch) for batch in packed] == [30, 30, 20]


def test_a_group_beyond_the_budget_is_refused_by_its_first_row():
    forest = Forest.from_rows([[1] * 3, [2] * 9, [2] * 8 + [3] * 2])
    with pytest.raises(ValueError, match="group of row 1 has 11 unique tokens, expected at most max_tokens=10"):
        pack_groups(forest, [[0], [2, 1]], max_tokens=10)
    assert len(pack_groups(forest, [[0], [2, 1]], max_tokens=11)) == 2
    with pytest.raises(ValueError, match="max_tokens: expected at least 1"):
        pack_groups(forest, [[0]], max_tokens=0)


def test_best_fit_takes_the_fullest_bin_with_room_and_the_least_loaded_is_next():
    assert best_fit([5, 7, 3, 2], 10) == [[1, 2], [0, 3]]
    assert best_fit([5, 7, 3, 2], 10, most_bins=1) == [[1, 2]]
    assert best_fit([12, 1], 10) == [[0], [1]]
    assert best_fit([], 10) == []
    assert least_loaded([4, 9, 4, 1], 2) == [[1], [0, 2, 3]]
    assert least_loaded([4.0, 9.0], 3) == [[1], [0], []]
