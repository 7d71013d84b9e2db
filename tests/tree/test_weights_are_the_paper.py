"""Row weights against the paper's sums over paths and over unique tokens (section Derivation)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest
from tree_rl.tree.weights import path_weights, row_token_weights, unique_token_weights

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


def draw_mask(forest: Forest, seed: int):
    return forest.row_index.with_values(np.random.default_rng(seed).integers(0, 2, forest.num_flat))


@given(rows=ROWS)
@settings(max_examples=100, deadline=None)
def test_verl_weighs_a_unique_token_by_its_rows(rows):
    forest = Forest.from_rows(rows)
    weights = row_token_weights(forest, "verl")
    assert weights.values.dtype == np.float64
    np.testing.assert_array_equal(unique_token_weights(forest, weights), forest.path_count)


@given(rows=ROWS, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_sep_avg_is_the_mean_of_independent_path_losses(rows, seed):
    forest = Forest.from_rows(rows)
    loss = np.random.default_rng(seed).normal(size=forest.num_unique)
    weights = row_token_weights(forest, "sep_avg")
    expected = 0.0
    for tree in range(forest.num_trees):
        members = np.flatnonzero(forest.tree_of_row == tree)
        expected += np.mean([loss[forest.row_index[int(row)]].sum() for row in members])
    total = (weights.values * loss[forest.row_index.values]).sum()
    np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)
    tree_loss = (forest.path_count / forest.tree_path_count * loss).sum()
    np.testing.assert_allclose(total, tree_loss, rtol=1e-12, atol=1e-12)


def test_sep_avg_can_count_paths_per_group():
    forest = Forest.from_rows([[1, 2], [1, 3], [1, 4]])
    weights = row_token_weights(forest, "sep_avg", group_of_row=np.array([7, 7, 9]))
    assert [row.tolist() for row in weights] == [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]]


@given(rows=ROWS, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_token_unique_weighs_every_trained_token_once(rows, seed):
    forest = Forest.from_rows(rows)
    everywhere = unique_token_weights(forest, row_token_weights(forest, "token_unique"))
    np.testing.assert_allclose(everywhere, 1.0, rtol=1e-12)
    mask = draw_mask(forest, seed)
    weights = row_token_weights(forest, "token_unique", trained=mask)
    assert (weights.values[mask.values == 0] == 0).all()
    is_trained = np.isin(np.arange(forest.num_unique), forest.row_index.values[mask.values != 0])
    np.testing.assert_allclose(unique_token_weights(forest, weights), is_trained, rtol=1e-12)


@given(rows=ROWS, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_custom_path_weights_add_up_on_shared_tokens(rows, seed):
    forest = Forest.from_rows(rows)
    weight_of_row = np.random.default_rng(seed).normal(size=len(rows))
    total = unique_token_weights(forest, path_weights(forest, weight_of_row))
    for token in range(forest.num_unique):
        np.testing.assert_allclose(total[token], weight_of_row[forest.rows_through(token)].sum(), atol=1e-12)


def test_wrong_arguments_are_named():
    forest = Forest.from_rows([[1, 2], [1]])
    with pytest.raises(ValueError, match="sep_avg or token_unique, received 'mean'"):
        row_token_weights(forest, "mean")
    with pytest.raises(ValueError, match="row 1 has nan"):
        path_weights(forest, np.array([1.0, np.nan]))
    with pytest.raises(ValueError, match=r"expected shape \(2,\), received \(3,\)"):
        path_weights(forest, np.ones(3))
    with pytest.raises(ValueError, match="one entry per row token"):
        row_token_weights(forest, "token_unique", trained=Forest.from_rows([[1], [1, 2]]).row_index)
    with pytest.raises(ValueError, match="group_of_row"):
        row_token_weights(forest, "sep_avg", group_of_row=np.zeros(3))


def test_no_rows_have_no_weights():
    for weighting in ("verl", "sep_avg", "token_unique"):
        assert len(row_token_weights(Forest.from_rows([]), weighting)) == 0
