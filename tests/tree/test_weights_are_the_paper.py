"""Weights of rows and tokens against the paper's sums over paths and over unique tokens (section Derivation)."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest
from tree_rl.tree.forest import Jagged
from tree_rl.tree.weights import once_per_token_weights, tree_mean_weights

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=9)


def in_total(forest: Forest, weights: Jagged) -> np.ndarray:
    """lambda_t: what each unique token weighs over the rows through it."""
    return np.bincount(forest.row_index.values, weights=weights.values, minlength=forest.num_unique)


@given(rows=ROWS, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_sep_avg_is_the_mean_of_independent_path_losses(rows, seed):
    forest = Forest.from_rows(rows)
    loss = np.random.default_rng(seed).normal(size=forest.num_unique)
    # Path weights w_k, the same on every token of a row.
    weights_F = np.repeat(tree_mean_weights(forest), forest.row_index.lengths)
    assert weights_F.dtype == np.float64
    expected = 0.0
    for tree in range(forest.num_trees):
        members = np.flatnonzero(forest.tree_of_row == tree)
        expected += np.mean([loss[forest.row_index[int(row)]].sum() for row in members])
    total = (weights_F * loss[forest.row_index.values]).sum()
    np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)
    first_row = [int(forest.rows_through(token)[0]) for token in range(forest.num_unique)]
    rows_of_tree = forest.rows_per_tree[forest.tree_of_row[first_row]]
    tree_loss = (forest.path_count / rows_of_tree * loss).sum()
    np.testing.assert_allclose(total, tree_loss, rtol=1e-12, atol=1e-12)


@given(rows=ROWS, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_token_unique_weighs_every_trained_token_once(rows, seed):
    forest = Forest.from_rows(rows)
    everywhere = in_total(forest, once_per_token_weights(forest))
    np.testing.assert_allclose(everywhere, 1.0, rtol=1e-12)
    mask = forest.row_index.with_values(np.random.default_rng(seed).integers(0, 2, forest.num_flat))
    weights = once_per_token_weights(forest, mask)
    assert (weights.values[mask.values == 0] == 0).all()
    is_trained = np.isin(np.arange(forest.num_unique), forest.row_index.values[mask.values != 0])
    np.testing.assert_allclose(in_total(forest, weights), is_trained, rtol=1e-12)
