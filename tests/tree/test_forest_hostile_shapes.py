"""Shapes and inputs on which prefix-tree code tends to break: ordinary cases here."""

import itertools
import tracemalloc

import numpy as np
import pytest

from tree_rl.tree import Forest, RowError
from tree_rl.tree.forest import order
from tree_rl.tree.forest.order import RowOrder
from tree_rl.tree.forest.trie import lay_out


def test_a_comb_of_twenty_thousand_segments_needs_no_recursion():
    # Row k leaves a spine after k tokens; written as an order of rows, because its flat tokens would be 50 million.
    lengths = np.arange(10_001, 1, -1)
    shared = np.append(0, lengths[1:] - 1)
    segments, _ = lay_out(RowOrder(rows=np.arange(10_000), shared=shared, lengths=lengths))
    assert len(segments) == 19_999
    assert segments.end[-1] == 20_000
    assert segments.depth.max() == 9_999
    assert sorted(segments.path_count) == sorted([1] * 10_000 + list(range(2, 10_001)))


def test_rows_of_any_integer_type_give_the_same_forest_and_the_caller_keeps_its_arrays():
    kinds = [np.uint8, np.int16, np.int32, np.int64, np.uint64]
    for left, right in itertools.product(kinds, kinds):
        rows = [np.array([3, 1], dtype=left), np.array([3, 2], dtype=right)]
        forest = Forest.from_rows(rows)
        rows[0][:] = 9
        assert forest.input_ids.tolist() == [3, 1, 2]
    row = np.array([1, 2, 3], dtype=np.int32)
    forest = Forest.from_rows([row])
    row[:] = 9
    assert forest.input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "at least one token"),
        ([1, -7], "token 1 is -7"),
        ([1.5, 2.0], r"integer token ids, received float64 .*1\.5"),
        ([True, False], "integer token ids, received bool"),
        (["a"], "integer token ids"),
        ([1, 2**31], "token 1 is 2147483648"),
        ([2**64], "18446744073709551616"),
        (np.array([2**63], dtype=np.uint64), "9223372036854775808"),
        ([[1, 2]], r"one dimension, received shape \(1, 2\)"),
        (5, r"one dimension, received shape \(\)"),
    ],
)
def test_a_bad_row_is_named(row, message):
    with pytest.raises(RowError, match=message) as caught:
        Forest.from_rows([[1, 2], row, [3]])
    assert str(caught.value).startswith("row 1: ")


def test_row_keys_and_token_keys_never_merge_and_a_bad_one_is_named():
    assert Forest.from_rows([[1], [1]], merge_key=[0, np.array([0])]).num_trees == 2
    with pytest.raises(ValueError, match="one entry for each of 2 rows, received 1"):
        Forest.from_rows([[1], [2]], merge_key=["a"])
    with pytest.raises(RowError, match="row 1: expected a merge_key of 2 tokens, received 3"):
        Forest.from_rows([[1], [2, 3]], merge_key=[np.array([0]), np.array([0, 0, 0])])
    with pytest.raises(RowError, match="row 0: expected integer merge_key, received float64"):
        Forest.from_rows([[1]], merge_key=[np.array([0.5])])


def test_select_refuses_unknown_and_repeated_rows():
    forest = Forest.from_rows([[1], [2]])
    with pytest.raises(ValueError, match="distinct rows"):
        forest.select_rows([0, 0])
    with pytest.raises(IndexError, match=r"rows in \[0, 2\)"):
        forest.select_rows([2])


def test_memory_is_a_small_multiple_of_the_flat_tokens():
    draw = np.random.default_rng(0)
    for shared in (0, 4_000, 8_000):
        rows = [draw.integers(0, 100_000, 8_192, dtype=np.int32) for _ in range(64)]
        for row in rows:
            row[:shared] = rows[0][:shared]
        tracemalloc.start()
        forest = Forest.from_rows(rows)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # Flat ids and byte strings and row index, 4 bytes each; five arrays and two int64 temporaries per unique token.
        assert peak <= 16 * forest.num_flat + 48 * forest.num_unique + 2**20


def test_work_per_row_does_not_grow_with_depth(monkeypatch):
    """Each row is compared with one neighbour, however deep the trie: B - 1 comparisons."""
    calls = []
    compare = order.shared_prefix
    monkeypatch.setattr(order, "shared_prefix", lambda left, right: calls.append(1) or compare(left, right))
    rows = [[0] * k + [1] for k in range(1, 300)]
    Forest.from_rows(rows)
    assert len(calls) == len(rows) - 1
