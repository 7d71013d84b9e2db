"""Recorded Mixture-of-Experts routes: tokens merge only if the same experts computed them in both rows.

If two rows agree on ids but not on experts, the forest branches, so each row keeps its routes.
Legend: F flat tokens of all rows, T tokens, N unique tokens, L decoder layers, K experts per token.
"""

from itertools import combinations

import numpy as np

from tree_rl.tree.forest import Forest

NATIVE = -1
"""Expert number where no route was recorded (last token of a row, observations); there the router chooses."""
TOKENS_AT_ONCE = 65_536
"""Number of tokens whose routes are compared at a time, because each becomes a Python object."""


def drop_filler(routes_TLK: np.ndarray) -> np.ndarray:
    """Write NATIVE where rollout engines and verl (column `routed_experts`) store zeros because nothing was recorded.

    The K experts of a token are distinct, so a repeated expert marks filler.

    Args:
        routes_TLK: integer [T, L, K], K >= 2.

    Raises:
        ValueError: K is 1, where filler looks like expert 0.
    """
    if routes_TLK.shape[-1] < 2:
        raise ValueError("routes with one expert per token cannot tell filler from expert 0; mark it with NATIVE")
    # One contiguous array per slot k, because NumPy is slow along the short axis K.
    slots = np.ascontiguousarray(routes_TLK.reshape(-1, routes_TLK.shape[-1]).T)
    repeats = np.zeros(slots.shape[1], dtype=bool)
    for first, second in combinations(slots, 2):
        repeats |= first == second
    native = np.array(NATIVE, dtype=routes_TLK.dtype if routes_TLK.dtype.kind == "i" else np.int64)
    return np.where(repeats.reshape(*routes_TLK.shape[:-1], 1), native, routes_TLK)


def number_routes(routes_FLK: np.ndarray) -> np.ndarray:
    """int64 [F], equal exactly where the routes of all layers (integer [F, L, K]) are equal, as merge keys.

    The order of the K experts does not matter: a token's output is their sum.
    """
    number_of: dict[bytes, int] = {}
    number_F = np.empty(len(routes_FLK), dtype=np.int64)
    for start in range(0, len(number_F), TOKENS_AT_ONCE):
        part = slice(start, start + TOKENS_AT_ONCE)
        tokens = _bytes_of_tokens(np.sort(routes_FLK[part], axis=-1)).tolist()
        number_F[part] = [number_of.setdefault(token, len(number_of)) for token in tokens]
    return number_F


def routes_of_unique_tokens(forest: Forest, routes_FLK: np.ndarray) -> np.ndarray:
    """The routes of each unique token, [N, L, K], from those of the rows' tokens.

    Raises:
        ValueError: the forest merged tokens with different routes.
    """
    index = forest.row_index.values
    unique = np.empty((forest.num_unique, *routes_FLK.shape[1:]), dtype=routes_FLK.dtype)
    unique[index] = routes_FLK
    # Compare bytes first: most rows list a token's experts in the same order. Sort only where they differ.
    unlike = np.flatnonzero(_bytes_of_tokens(unique)[index] != _bytes_of_tokens(routes_FLK))
    differs = (np.sort(unique[index[unlike]]) != np.sort(routes_FLK[unlike])).any(axis=(1, 2))
    if differs.any():
        first = int(unlike[differs.argmax()])
        row = int(np.searchsorted(forest.row_index.offsets, first, side="right")) - 1
        raise ValueError(f"row {row} shares a token with a row of other routes; merge rows by number_routes")
    return unique


def _bytes_of_tokens(routes_TLK: np.ndarray) -> np.ndarray:
    """[T], one opaque value per token that can be compared and hashed."""
    table = np.ascontiguousarray(routes_TLK).reshape(len(routes_TLK), -1)
    return table.view(np.dtype((np.void, table.shape[1] * table.itemsize)))[:, 0]
