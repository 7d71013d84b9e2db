"""With recorded routes a token is shared exactly where ids and routes agree along the whole prefix, and not less."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.models.routers.merge_routes import NATIVE, drop_filler, routes_of_unique_tokens
from tree_rl.training import Rows
from tree_rl.tree.forest import Forest

LAYERS, EXPERTS = 2, 3
PAIRS = [(0, 1), (1, 2), (2, 0), (NATIVE, NATIVE)]
TOKEN = st.tuples(st.integers(0, 1), st.lists(st.sampled_from(PAIRS), min_size=LAYERS, max_size=LAYERS))
ROWS = st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=6)

RoutedRow = list[tuple[int, list[tuple[int, int]]]]


def canonical(row: RoutedRow, length: int) -> tuple[object, ...]:
    return tuple((token, tuple(tuple(sorted(pair)) for pair in route)) for token, route in row[:length])


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, data=st.data())
def test_unique_tokens_are_the_distinct_routed_prefixes(rows: list[RoutedRow], data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    ids = [[token for token, _ in row] for row in rows]
    routes = [np.array([route for _, route in row], dtype=np.int16) for row in rows]
    grouped = replace(Rows.of(ids, groups=groups), routes_FLK=np.concatenate(routes))
    forest = Forest.from_rows(ids, merge_key=grouped.merge_keys(by_group=True))
    prefixes = {
        (group, canonical(row, length))
        for group, row in zip(groups, rows, strict=True)
        for length in range(1, len(row) + 1)
    }
    assert forest.num_unique == len(prefixes)
    unique = routes_of_unique_tokens(forest, np.concatenate(routes))
    for row, routes_of_row in enumerate(routes):
        assert forest.row_tokens(row).tolist() == ids[row]
        assert np.array_equal(np.sort(unique[forest.row_index[row]]), np.sort(routes_of_row))


def test_zeros_that_stand_for_no_record_become_native() -> None:
    stored = np.array([[[0, 2], [0, 1]], [[0, 0], [0, 0]], [[2, 0], [0, 0]]], dtype=np.int16)
    marked = drop_filler(stored)
    assert marked.dtype == np.int16
    assert marked.tolist() == [[[0, 2], [0, 1]], [[NATIVE] * 2] * 2, [[2, 0], [NATIVE] * 2]]
    with pytest.raises(ValueError, match="one expert per token"):
        drop_filler(stored[..., :1])


def test_a_forest_that_merged_other_routes_is_refused() -> None:
    one = np.zeros((2, 1, 2), dtype=np.int16)
    with pytest.raises(
        ValueError, match="row 0 shares a token with a row of other routes; merge rows by number_routes"
    ):
        routes_of_unique_tokens(Forest.from_rows([[1, 2], [1, 2]]), np.concatenate([one, one + 1]))
