"""What each row, or each token of a row, weighs in the loss (paper, eq. 1 and section Derivation).

With path weights w_k a unique token weighs lambda_t = sum of w_k over the rows k through t, because
sum_k w_k sum_{t in p_k} l_t = sum_t lambda_t l_t. w_k = 1 gives the rows' own objective, sum_t g_t l_t.
Legend: B rows, F flat tokens, K rows of a tree, g_t rows through token t.
"""

import numpy as np

from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged


def tree_mean_weights(forest: Forest) -> np.ndarray:
    """w_k = 1 / K for the rows of each tree, float64 [B]: a unique token weighs g_t / K, the boxed loss (`sep_avg`)."""
    return 1.0 / forest.tree_rows[forest.tree_of_row]


def once_per_token_weights(forest: Forest, trained: Jagged | None = None) -> Jagged:
    """1 / g_t for each row's token, float64 [B, L_b]: a unique token weighs lambda_t = 1 in total (`token_unique`).

    Args:
        forest: the rows.
        trained: [B, L_b], nonzero where the row's token has a loss; then g_t counts the rows that train the token, and
            tokens without a loss weigh 0. None means everywhere.

    Raises:
        ValueError: a mask whose shape is not that of the rows.
    """
    index = forest.row_index
    if trained is None:
        return index.with_values(1.0 / forest.path_count[index.values])
    rows_that_train = forest.rows_that_mark(trained)
    is_trained = trained.values != 0
    shares = np.zeros(forest.num_flat)
    shares[is_trained] = 1.0 / rows_that_train[index.values[is_trained]]
    return index.with_values(shares)
