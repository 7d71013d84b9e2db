"""A forest as one causal row per leaf, for kernels that support rows but not trees.

In DFS order, the tokens after one leaf, up to and including the next leaf, are a chain. They are the queries of the
next leaf's row; its keys are the leaf's whole path. A causal mask aligned at the row's end is then the mask of the
tree: every visible pair is computed once, without a mask function or block lists. The price is that a shared key is
copied for every row but one.
Legend: N unique tokens, B leaves, F keys of all paths, K key heads, D head size; X = F - N copies, of S tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from tree_kernels.host_copy import to_device_together
from tree_kernels.tree_layout import TreeLayout, depths_on_host


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyCopies:
    """Indices between tokens and the keys of paths; int64 on the layout's device."""

    token: torch.Tensor
    """[F], token of each key."""
    own_key: torch.Tensor
    """[N], key of each token in the row in which it is a query."""
    shared_token: torch.Tensor
    """[S], tokens that are keys of several rows."""
    copy_key: torch.Tensor
    """[X], keys of shared tokens in all other rows."""
    copy_of: torch.Tensor
    """[X], index into `shared_token` of each copy."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeafRows:
    """The rows of a forest, in DFS order of their leaves."""

    query_offsets: torch.Tensor
    """int32 [B + 1], first query of each row, then N."""
    key_offsets: torch.Tensor
    """int32 [B + 1], first key of each row, then F."""
    longest_query: int
    """Most queries of a row."""
    longest_key: int
    """Most keys of a row."""
    copies: KeyCopies | None
    """Copied keys; None if the rows share no tokens."""


def leaf_rows(layout: TreeLayout, *, most_keys: float, fewest_queries: float) -> LeafRows | None:
    """The leaf rows of a layout without a past, or None if a limit is exceeded or the host does not have the layout.

    Args:
        layout: the forest; at least one token.
        most_keys: upper limit of F / N.
        fewest_queries: lower limit of N / B, if F > N.
    """
    if layout.on_host is None:
        return None
    end = layout.on_host
    num_tokens = len(end)
    first = np.append(0, np.flatnonzero(end[:-1] == np.arange(1, num_tokens)) + 1)
    own = np.diff(first, append=num_tokens)
    shared = depths_on_host(end)[first]
    num_keys = num_tokens + int(shared.sum())
    if num_keys > num_tokens and (num_keys > most_keys * num_tokens or num_tokens < fewest_queries * len(first)):
        return None
    query_offsets = np.append(first, num_tokens).astype(np.int32)
    key_offsets = np.append(0, np.cumsum(shared + own)).astype(np.int32)
    arrays = [query_offsets, key_offsets]
    if num_keys > num_tokens:
        arrays += _copies(first, own, shared, key_offsets)
    on_device = to_device_together(arrays, layout.device)
    return LeafRows(
        query_offsets=on_device[0],
        key_offsets=on_device[1],
        longest_query=int(own.max()),
        longest_key=int((shared + own).max()),
        copies=KeyCopies(**dict(zip(KeyCopies.__slots__, on_device[2:], strict=True))) if on_device[2:] else None,
    )


def _copies(first: np.ndarray, own: np.ndarray, shared: np.ndarray, key_offsets: np.ndarray) -> list[np.ndarray]:
    """The arrays of `KeyCopies`, int64."""
    token = np.empty(key_offsets[-1], dtype=np.int64)
    is_copy = np.ones(len(token), dtype=bool)
    path = np.empty(int((shared + own).max()), dtype=np.int64)
    for start, mine, before, place in np.stack([first, own, shared, key_offsets[:-1]], axis=1).tolist():
        path[before : before + mine] = np.arange(start, start + mine)
        token[place : place + before + mine] = path[: before + mine]
        is_copy[place + before : place + before + mine] = False
    copy_key = np.flatnonzero(is_copy)
    is_shared = np.zeros(len(token) - len(copy_key), dtype=bool)
    is_shared[token[copy_key]] = True
    copy_of = (np.cumsum(is_shared) - 1)[token[copy_key]]
    return [token, np.flatnonzero(~is_copy), np.flatnonzero(is_shared), copy_key, copy_of]


def along_paths(t_NKD: torch.Tensor, copies: KeyCopies) -> torch.Tensor:
    """Keys or values of all paths, [F, K, D]; gradients of copies are summed in float32."""
    of_paths_FKD: torch.Tensor = _AlongPaths.apply(t_NKD, copies)
    return of_paths_FKD


class _AlongPaths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t_NKD: torch.Tensor, copies: KeyCopies) -> torch.Tensor:
        ctx.copies = copies
        return t_NKD.index_select(0, copies.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_FKD: torch.Tensor) -> tuple[torch.Tensor, None]:
        copies: KeyCopies = ctx.copies
        grad_NKD = grad_FKD.index_select(0, copies.own_key)
        wide = torch.promote_types(grad_FKD.dtype, torch.float32)
        # Most tokens are in one row only, so only the others are converted and summed.
        sums_SKD = grad_NKD.index_select(0, copies.shared_token).to(wide)
        sums_SKD.index_add_(0, copies.copy_of, grad_FKD.index_select(0, copies.copy_key).to(wide))
        return grad_NKD.index_copy_(0, copies.shared_token, sums_SKD.to(grad_NKD.dtype)), None
