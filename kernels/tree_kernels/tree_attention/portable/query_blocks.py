"""The keys that a block of consecutive DFS tokens reads, planned once per layout on the host.

The keys before a block are the ancestors of its first token, by depth. Their subtree ends decrease with depth, so the
keys that the whole block sees come first. Indices of keys and queries include the past.
Legend: B tokens of a block, M its keys, R keys that some of its queries do not see.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_kernels.tree_attention.block_lists import key_depths, key_ends
from tree_kernels.tree_layout import TreeLayout, kept

MAX_RUNS = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueryBlock:
    """Consecutive queries and the keys they read."""

    start: int
    """First token of the block."""
    stop: int
    """First token after the block."""
    runs: tuple[tuple[int, int], ...]
    """Ranges [first, last) that together contain the M keys."""
    key_index: torch.Tensor | None
    """int64 [M], all keys, if there are too many runs to slice; else None."""
    masked_from: int
    """Number of leading keys that every query of the block sees; the R others follow."""
    query: torch.Tensor
    """int32 [B, 1], indices of the queries."""
    masked_key: torch.Tensor
    """int32 [R], keys that need a mask."""
    masked_end: torch.Tensor
    """int32 [R], subtree end of each masked key."""
    depths: tuple[torch.Tensor, torch.Tensor] | None
    """int32 [B, 1] depth of each query and int32 [R] of each masked key; None without a window."""
    window: int | None
    """Attention window, as in `tree_attention`."""

    @property
    def num_keys(self) -> int:
        """M, number of keys."""
        return self.masked_from + self.masked_key.shape[0]

    def visible(self) -> torch.Tensor:
        """bool [B, R]: which of the masked keys each query sees."""
        seen = (self.masked_key <= self.query) & (self.query < self.masked_end)
        if self.depths is not None and self.window is not None:
            seen &= self.depths[0] - self.depths[1] < self.window
        return seen

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [B, M] of 0 and -inf."""
        bias = torch.zeros(self.stop - self.start, self.num_keys, dtype=dtype, device=self.masked_key.device)
        bias[:, self.masked_from :].masked_fill_(~self.visible(), float("-inf"))
        return bias

    def gather(self, t_MKD: torch.Tensor) -> torch.Tensor:
        """Rows of the block's keys; a view if they are one run."""
        if self.key_index is not None:
            return t_MKD.index_select(0, self.key_index)
        if len(self.runs) == 1:
            return t_MKD[slice(*self.runs[0])]
        return torch.cat([t_MKD[first:last] for first, last in self.runs])

    def scatter_add(self, into_MKD: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows of the block's keys to `into_MKD` in place: the transpose of `gather`."""
        if self.key_index is not None:
            into_MKD.index_add_(0, self.key_index, rows)
            return
        done = 0
        for first, last in self.runs:
            into_MKD[first:last] += rows[done : done + last - first]
            done += last - first


@kept
def query_blocks(layout: TreeLayout, block_tokens: int, window: int | None) -> tuple[QueryBlock, ...]:
    """The query blocks of a layout; cached with it."""
    end, depth = key_ends(layout).cpu().numpy(), key_depths(layout).cpu().numpy()
    starts = range(0, layout.num_tokens, block_tokens)
    bounds = ((start, min(start + block_tokens, layout.num_tokens)) for start in starts)
    return tuple(_block(layout, *bound, end, depth, window) for bound in bounds)


def _block(
    layout: TreeLayout, start: int, stop: int, end: np.ndarray, depth: np.ndarray, window: int | None
) -> QueryBlock:
    first, last = layout.past_length + start, layout.past_length + stop
    queries, query_depth = np.arange(first, last), depth[first:last]
    read = end[:first] > first
    if window is not None:
        read &= depth[:first] > query_depth.min() - window
    keys = np.concatenate([np.flatnonzero(read), queries])
    seen_by_all = (keys < first) & (end[keys] >= last)
    if window is not None:
        seen_by_all &= query_depth.max() - depth[keys] < window
    masked_from = int(np.argmin(seen_by_all))
    masked = keys[masked_from:]
    breaks = np.flatnonzero(np.diff(keys) != 1) + 1
    bounds = zip(keys[np.append(0, breaks)].tolist(), keys[np.append(breaks, len(keys)) - 1].tolist(), strict=True)
    runs = tuple((a, b + 1) for a, b in bounds)

    on_device = functools.partial(to_device, device=layout.device)
    return QueryBlock(
        start=start,
        stop=stop,
        runs=runs,
        key_index=on_device(keys) if len(runs) > MAX_RUNS else None,
        masked_from=masked_from,
        query=on_device(queries.astype(np.int32))[:, None],
        masked_key=on_device(masked.astype(np.int32)),
        masked_end=on_device(end[masked]),
        depths=None if window is None else (on_device(query_depth)[:, None], on_device(depth[masked])),
        window=window,
    )
