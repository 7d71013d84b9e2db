"""Weights of rows, or of their tokens, in the loss (paper, eq. 1 and section Derivation).

With path weights w_k a unique token has weight lambda_t = sum of w_k over the rows k through t, because
sum_k w_k sum_{t in p_k} l_t = sum_t lambda_t l_t. w_k = 1 gives the objective of the rows, sum_t g_t l_t.
Legend: B rows, F flat tokens, K rows of a tree, g_t rows through token t.
"""

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged


def tree_mean_weights(forest: Forest) -> np.ndarray:
    """w_k = 1 / K for the rows of each tree, float64 [B]: a unique token has weight g_t / K, the paper's boxed loss
    (`sep_avg`)."""
    return 1.0 / forest.rows_per_tree[forest.tree_of_row]


def session_weights(session_of_row: np.ndarray) -> np.ndarray:
    """w_k = 1 / (rows of the session), float64 [B]: a session weighs one (`session`). ``session_of_row`` is int [B]."""
    _, number, rows = np.unique(session_of_row, return_inverse=True, return_counts=True)
    return 1.0 / rows[number]


def once_per_token_weights(forest: Forest, trained: Jagged | None = None) -> Jagged:
    """1 / g_t for each row's token, float64 [B, L_b]: a unique token has weight lambda_t = 1 (`token_unique`).

    With ``trained`` [B, L_b], nonzero where the row's token has a loss, g_t counts only the rows that train the token,
    and tokens without a loss get weight 0.

    Raises:
        ValueError: the mask has another shape than the rows.
    """
    index = forest.row_index
    if trained is None:
        return index.with_values(1.0 / forest.path_count[index.values])
    rows_that_train = forest.rows_that_mark(trained)
    is_trained = trained.values != 0
    shares = np.zeros(forest.num_flat)
    shares[is_trained] = 1.0 / rows_that_train[index.values[is_trained]]
    return index.with_values(shares)
