"""Packing: every row once, within the budget, groups whole where they fit."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest
from tree_rl.tree.packing import pack_groups, split_rows
from tree_rl.tree.row_order import RowOrder

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=14)


def unique_tokens(forest: Forest, rows: np.ndarray) -> int:
    return len({int(token) for row in rows for token in forest.row_index[int(row)]})


@given(rows=ROWS, budget=st.integers(1, 40), num_groups=st.integers(1, 5), at_least=st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_every_row_once_within_the_budget(rows, budget, num_groups, at_least):
    groups = [list(range(number, len(rows), num_groups)) for number in range(num_groups)]
    forest = Forest.from_rows(rows, merge_key=[row % num_groups for row in range(len(rows))])
    packing = pack_groups(forest, groups, max_tokens=budget, at_least=at_least)
    assert sorted(int(row) for batch in packing.micro_batches for row in batch.rows) == list(range(len(rows)))
    for batch in packing.micro_batches:
        assert batch.unique_tokens == unique_tokens(forest, batch.rows)
        if batch.unique_tokens > budget:
            longest = max(len(rows[row]) for row in batch.rows)
            assert batch.unique_tokens == longest
    assert packing.oversized_rows == tuple(row for row in range(len(rows)) if len(rows[row]) > budget)
    whole = [number for number, group in enumerate(groups) if unique_tokens(forest, np.array(group, int)) <= budget]
    assert not set(whole) & set(packing.split_groups)
    for number in whole:
        holders = [batch for batch in packing.micro_batches if set(groups[number]) & set(batch.rows.tolist())]
        assert len(holders) <= 1
    if not packing.split_groups:
        assert packing.repeated_tokens == 0
    total = sum(batch.unique_tokens for batch in packing.micro_batches)
    assert total <= forest.num_unique + packing.repeated_tokens
    pieces = sum(bool(group) for group in groups)
    assert len(packing.micro_batches) >= min(at_least, pieces)


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=7),
    budget=st.integers(1, 12),
)
@settings(max_examples=200, deadline=None)
def test_a_split_repeats_as_few_tokens_as_any_cut_of_the_order(rows, budget):
    forest = Forest.from_rows(rows)
    order = forest.row_order
    pieces = split_rows(order, budget)
    found = (sum(piece.unique_tokens for piece in pieces), len(pieces))
    best = None
    for cuts in product([False, True], repeat=len(rows) - 1):
        borders = [0, *[rank + 1 for rank, cut in enumerate(cuts) if cut], len(rows)]
        runs = [order.rows[left:right] for left, right in pairwise(borders)]
        sizes = [unique_tokens(forest, run) for run in runs]
        limits = [max(budget, *(len(rows[row]) for row in run)) for run in runs]
        if all(size <= limit for size, limit in zip(sizes, limits, strict=True)):
            best = min(best or (10**9, 0), (sum(sizes), len(sizes)))
    assert found == best
    assert sum(piece.unique_tokens for piece in pieces) == sum(unique_tokens(forest, piece.rows) for piece in pieces)


def test_repeating_no_token_comes_before_fewer_pieces():
    order = RowOrder(rows=np.arange(4), shared=np.array([0, 0, 1, 0]), lengths=np.full(4, 4))
    assert [piece.unique_tokens for piece in split_rows(order, 8)] == [4, 7, 4]


def test_a_split_group_reports_what_it_repeats():
    forest = Forest.from_rows([[1] * 10 + [2] * 5, [1] * 10 + [3] * 5, [1] * 10 + [4] * 5])
    packing = pack_groups(forest, [[0, 1, 2]], max_tokens=20)
    assert packing.split_groups == (0,)
    assert packing.repeated_tokens == 10
    assert [batch.unique_tokens for batch in packing.micro_batches] == [20, 15]


def test_small_groups_fill_few_even_micro_batches():
    rows = [[group] * 10 for group in range(8)]
    packing = pack_groups(Forest.from_rows(rows), [[row] for row in range(8)], max_tokens=30)
    assert [batch.unique_tokens for batch in packing.micro_batches] == [30, 30, 20]
    packing = pack_groups(Forest.from_rows(rows), [[row] for row in range(8)], max_tokens=30, at_least=4)
    assert [batch.unique_tokens for batch in packing.micro_batches] == [20, 20, 20, 20]


def test_a_row_beyond_the_budget_runs_alone():
    packing = pack_groups(Forest.from_rows([[1] * 50, [2] * 3, [3] * 3]), [[0], [1], [2]], max_tokens=10)
    assert [batch.rows.tolist() for batch in packing.micro_batches] == [[0], [1, 2]]
    assert packing.oversized_rows == (0,)
    assert packing.split_groups == ()


def test_copies_and_prefixes_of_a_long_row_cost_nothing():
    packing = pack_groups(Forest.from_rows([[1] * 50, [1] * 50, [1] * 20]), [[0, 1, 2]], max_tokens=10)
    assert [batch.unique_tokens for batch in packing.micro_batches] == [50]
    assert packing.repeated_tokens == 0


def test_no_rows_need_no_micro_batch():
    assert pack_groups(Forest.from_rows([]), [], max_tokens=10, at_least=3).micro_batches == ()
    assert pack_groups(Forest.from_rows([]), [[]], max_tokens=10).micro_batches == ()


def test_wrong_groups_are_named():
    forest = Forest.from_rows([[1], [2]])
    with pytest.raises(ValueError, match="row 1 appears again"):
        pack_groups(forest, [[0, 1], [1]], max_tokens=10)
    with pytest.raises(IndexError, match=r"rows in \[0, 2\), received 5"):
        pack_groups(forest, [[0, 5]], max_tokens=10)
    with pytest.raises(ValueError, match="max_tokens: expected at least 1"):
        pack_groups(forest, [[0]], max_tokens=0)
