"""What each token of each row weighs in the loss (paper, section Derivation).

With path weights w_k a unique token weighs lambda_t = sum of w_k over the rows k through t, because
sum_k w_k sum_{t in p_k} l_t = sum_t lambda_t l_t; w_k = 1/K gives the tree loss sum_t (g_t / K) l_t.
Legend: N unique tokens, B rows, F flat tokens.
"""

from typing import Literal

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged

PathWeighting = Literal["verl", "sep_avg", "token_unique"]


def row_token_weights(
    forest: Forest,
    weighting: PathWeighting,
    *,
    trained: Jagged | None = None,
    group_of_row: np.ndarray | None = None,
) -> Jagged:
    """Weights that multiply the loss of each row's tokens, before any aggregation of verl's.

    * ``verl``: 1. The sum over rows is then sum_t g_t l_t, the rows' own objective.
    * ``sep_avg``: 1 / K in a tree of K rows, so that a unique token weighs g_t / K (the boxed tree loss).
    * ``token_unique``: 1 / h_t, with h_t the rows in which the token is trained, so that every unique token weighs 1
      in total (lambda_t = 1). Without a mask h_t = g_t. Where the token is not trained the weight is 0.

    Args:
        forest: the rows.
        weighting: one of the three above.
        trained: [B, L_b], nonzero where the row's token has a loss; None means everywhere. Only ``token_unique`` asks.
        group_of_row: int [B], what counts as one tree for ``sep_avg``, such as the prompt of a row: two prompts with
            a common first token would else be one tree. None takes the trees of the forest.

    Returns:
        float64 [B, L_b].

    Raises:
        ValueError: unknown weighting, or a mask or groups whose shape is not that of the rows.
    """
    if weighting == "verl":
        return forest.row_index.with_values(np.ones(forest.num_flat))
    if weighting == "sep_avg":
        tree_of_row = forest.tree_of_row if group_of_row is None else np.asarray(group_of_row)
        if tree_of_row.shape != (forest.num_rows,):
            raise ValueError(f"group_of_row: expected shape ({forest.num_rows},), received {tree_of_row.shape}")
        _, tree, rows_in_tree = np.unique(tree_of_row, return_inverse=True, return_counts=True)
        return path_weights(forest, 1.0 / rows_in_tree[tree])
    if weighting == "token_unique":
        return _once_per_unique_token(forest, trained)
    raise ValueError(f"path_weighting: expected verl, sep_avg or token_unique, received {weighting!r}")


def path_weights(forest: Forest, weight_of_row: np.ndarray) -> Jagged:
    """Custom path weights w_k, the same on every token of a row.

    Args:
        forest: the rows.
        weight_of_row: float [B], w_k; negative weights are allowed, as in a difference of two losses.

    Returns:
        float64 [B, L_b].

    Raises:
        ValueError: not one finite weight per row.
    """
    weights = np.asarray(weight_of_row, dtype=np.float64)
    if weights.shape != (forest.num_rows,):
        raise ValueError(f"path weights: expected shape ({forest.num_rows},), received {weights.shape}")
    if not np.isfinite(weights).all():
        row = int(np.argmin(np.isfinite(weights)))
        raise ValueError(f"path weights: expected finite weights, but row {row} has {weights[row]}")
    return forest.row_index.with_values(np.repeat(weights, forest.row_index.lengths))


def unique_token_weights(forest: Forest, weights: Jagged) -> np.ndarray:
    """lambda_t: what each unique token weighs in total.

    Args:
        forest: the rows.
        weights: float [B, L_b], weights per row token.

    Returns:
        float64 [N], their sum over the rows through each token.
    """
    return np.bincount(forest.row_index.values, weights=weights.values, minlength=forest.num_unique)


def _once_per_unique_token(forest: Forest, trained: Jagged | None) -> Jagged:
    index = forest.row_index
    if trained is None:
        return index.with_values(1.0 / forest.path_count[index.values])
    if not np.array_equal(trained.offsets, index.offsets):
        raise ValueError("trained: expected one entry per row token, received rows of other lengths")
    is_trained = trained.values != 0
    rows_that_train = np.bincount(index.values[is_trained], minlength=forest.num_unique)
    shares = np.zeros(forest.num_flat)
    shares[is_trained] = 1.0 / rows_that_train[index.values[is_trained]]
    return index.with_values(shares)
