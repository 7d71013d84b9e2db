"""A forest as one row per leaf, its own tokens asking its whole path, for kernels that know rows and no trees.

In DFS order the tokens behind one leaf, up to the next, are a chain, and the ancestors of its first token are the
beginning of the path to the leaf before. A causal mask aligned at the row's end is then the mask of the tree: every
visible pair is computed once, without a mask function and block lists. The price is a copy of each shared key for every
row but one.
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
    """Where the keys of paths come from; int64 on the layout's device."""

    token: torch.Tensor
    """[F], the token whose key and value stand there"""
    own_key: torch.Tensor
    """[N], where each token stands in the row of which it is a query"""
    shared_token: torch.Tensor
    """[S], tokens that stand in several rows"""
    copy_key: torch.Tensor
    """[X], where they stand besides"""
    copy_of: torch.Tensor
    """[X], index into `shared_token`"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeafRows:
    """The rows of a forest, in DFS order of their leaves."""

    query_offsets: torch.Tensor
    """int32 [B + 1], first query of each row, then N"""
    key_offsets: torch.Tensor
    """int32 [B + 1], first key of each row, then F"""
    longest_query: int
    """queries of the row with most of them, known to the host"""
    longest_key: int
    """keys of the row with most of them"""
    copies: KeyCopies | None
    """None where no row shares a token with another: the keys are the tokens'"""


def leaf_rows(layout: TreeLayout, *, most_keys: float, fewest_queries: float) -> LeafRows | None:
    """The rows of a layout without a past, or None where its trees are better run as trees or the host has no data.

    Args:
        layout: the forest; at least one token.
        most_keys: limit of F / N.
        fewest_queries: limit of N / B, where F > N.
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
    """Keys or values of all paths, [F, K, D]; gradients of a token's copies are summed in float32."""
    of_paths_FKD: torch.Tensor = _AlongPaths.apply(t_NKD, copies)
    return of_paths_FKD


class _AlongPaths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t_NKD: torch.Tensor, copies: KeyCopies) -> torch.Tensor:
        """Keys of all paths [F, K, D]."""
        ctx.copies = copies
        return t_NKD.index_select(0, copies.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_FKD: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gradient [N, K, D] of the tokens' keys."""
        copies: KeyCopies = ctx.copies
        grad_NKD = grad_FKD.index_select(0, copies.own_key)
        wide = torch.promote_types(grad_FKD.dtype, torch.float32)
        # Most tokens stand in one row alone, so only the others are widened and summed.
        sums_SKD = grad_NKD.index_select(0, copies.shared_token).to(wide)
        sums_SKD.index_add_(0, copies.copy_of, grad_FKD.index_select(0, copies.copy_key).to(wide))
        return grad_NKD.index_copy_(0, copies.shared_token, sums_SKD.to(grad_NKD.dtype)), None
