"""Recorded Mixture-of-Experts routes: tokens merge only if the same experts computed them in both rows.

If two rows agree on ids but not on experts, the forest branches, so each row keeps its routes.
Legend: B rows, T tokens of a row, N unique tokens, L decoder layers, K experts per token.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from tree_rl.tree.forest import Forest, RowError

NATIVE = -1
"""Expert number where no route was recorded (last token of a row, observations); there the router chooses."""


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


def route_keys(routes: Sequence[np.ndarray], groups: Sequence[int] | np.ndarray | None = None) -> list[np.ndarray]:
    """Merge keys for `Forest.from_rows`, equal exactly where the routes of all layers are equal.

    Args:
        routes: B integer arrays [T, L, K]. The order of the K experts does not matter: a token's output is their sum.
        groups: one number per row; rows of different groups never merge. None lets all rows merge.

    Returns:
        B arrays, int64 [T].

    Raises:
        RowError: a row's routes are not three-dimensional, not integer, or differ from the first row's in L or K.
        ValueError: groups does not have one entry per row.
    """
    if groups is not None and len(groups) != len(routes):
        raise ValueError(f"groups: expected one for each of {len(routes)} rows, received {len(groups)}")
    # With a common dtype, the bytes of two tokens are equal exactly if their experts are.
    dtype = np.result_type(*{np.asarray(routes_TLK).dtype for routes_TLK in routes}, np.int16)
    number_of: dict[tuple[int, bytes], int] = {}
    keys = []
    for row, routes_TLK in enumerate(routes):
        _check(routes_TLK, row, routes[0].shape[1:])
        group = 0 if groups is None else int(groups[row])
        tokens = _bytes_of_tokens(np.sort(routes_TLK, axis=-1).astype(dtype, copy=False)).tolist()
        numbers = [number_of.setdefault((group, token), len(number_of)) for token in tokens]
        keys.append(np.array(numbers, dtype=np.int64))
    return keys


def routes_of_unique_tokens(forest: Forest, routes: Sequence[np.ndarray]) -> np.ndarray:
    """The routes of each unique token.

    Args:
        forest: the rows, built with `route_keys` as merge keys.
        routes: B integer arrays [T, L, K], as given to `route_keys`.

    Returns:
        [N, L, K], same dtype as the routes.

    Raises:
        ValueError: the routes belong to other rows, or the forest merged tokens with different routes.
    """
    lengths = [len(routes_TLK) for routes_TLK in routes]
    if lengths != forest.row_index.lengths.tolist():
        raise ValueError(f"expected routes of rows of {forest.row_index.lengths.tolist()} tokens, received {lengths}")
    flat = np.concatenate(routes)
    index = forest.row_index.values
    unique = np.empty((forest.num_unique, *flat.shape[1:]), dtype=flat.dtype)
    unique[index] = flat
    # Compare bytes first: most rows list a token's experts in the same order. Sort only where they differ.
    unlike = np.flatnonzero(_bytes_of_tokens(unique)[index] != _bytes_of_tokens(flat))
    differs = (np.sort(unique[index[unlike]]) != np.sort(flat[unlike])).any(axis=(1, 2))
    if differs.any():
        first = int(unlike[differs.argmax()])
        row = int(np.searchsorted(forest.row_index.offsets, first, side="right")) - 1
        raise ValueError(f"row {row} shares a token with a row of other routes; build the forest with route_keys")
    return unique


def _bytes_of_tokens(routes_TLK: np.ndarray) -> np.ndarray:
    """[T], one opaque value per token that can be compared and hashed."""
    table = np.ascontiguousarray(routes_TLK).reshape(len(routes_TLK), -1)
    return table.view(np.dtype((np.void, table.shape[1] * table.itemsize)))[:, 0]


def _check(routes: np.ndarray, row: int, layers_and_experts: tuple[int, ...]) -> None:
    if routes.ndim != 3 or routes.dtype.kind not in "iu":
        raise RowError(
            f"row {row}: expected integer routes [tokens, layers, experts], received {routes.dtype} {routes.shape}"
        )
    if routes.shape[1:] != layers_and_experts:
        raise RowError(f"row {row}: expected routes of {layers_and_experts} per token, received {routes.shape[1:]}")
