"""Which keys a block of consecutive DFS tokens reads, built once per layout on the host.

Keys visible to the first token of a block are its ancestors, in order of depth; their subtree ends fall with depth,
so those seen by the whole block come first. Legend: N unique tokens, P past tokens, B tokens of a block, M its keys.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.layout import TreeLayout

MAX_RUNS = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueryBlock:
    """Consecutive queries and the keys they read, in key coordinates (past first, then the forest)."""

    start: int
    """first token of the block"""
    stop: int
    """first token after the block"""
    runs: tuple[tuple[int, int], ...]
    """contiguous key ranges [first, last), together the M keys"""
    key_index: torch.Tensor | None
    """int64 [M], all keys where the runs are too many to slice; None: slice the runs"""
    masked_from: int
    """number of leading keys seen by every query of the block"""
    masked_token: torch.Tensor
    """int32 [M - masked_from], token of each remaining key, negative in the past"""
    masked_end: torch.Tensor
    """int32 [M - masked_from], subtree end of each remaining key"""
    masked_depth: torch.Tensor | None
    """int32 [M - masked_from], depth of each remaining key; None without a window"""
    query_depth: torch.Tensor | None
    """int32 [B], depth of each query; None without a window"""
    window: int | None
    """a query at depth d sees keys of depth > d - window only"""

    @property
    def num_keys(self) -> int:
        """Number M of keys."""
        return self.masked_from + self.masked_token.shape[0]

    def visible(self) -> torch.Tensor:
        """bool [B, M - masked_from]: which of the remaining keys each query sees."""
        query = torch.arange(self.start, self.stop, dtype=torch.int32, device=self.masked_token.device)[:, None]
        seen = (self.masked_token <= query) & (query < self.masked_end)
        if self.window is not None and self.masked_depth is not None and self.query_depth is not None:
            seen &= self.query_depth[:, None] - self.masked_depth < self.window
        return seen

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[B, M] of 0 and -inf, to be added to the scores."""
        bias = torch.zeros(self.stop - self.start, self.num_keys, dtype=dtype, device=self.masked_token.device)
        bias[:, self.masked_from :].masked_fill_(~self.visible(), float("-inf"))
        return bias

    def gather(self, t_MKD: torch.Tensor) -> torch.Tensor:
        """Rows of the block's keys, a view where they are one range."""
        if self.key_index is not None:
            return t_MKD.index_select(0, self.key_index)
        if len(self.runs) == 1:
            return t_MKD[slice(*self.runs[0])]
        return torch.cat([t_MKD[first:last] for first, last in self.runs])

    def scatter_add(self, into_MKD: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the block's rows to `into_MKD` in place: the transpose of `gather`."""
        if self.key_index is not None:
            into_MKD.index_add_(0, self.key_index, rows)
            return
        done = 0
        for first, last in self.runs:
            into_MKD[first:last] += rows[done : done + last - first]
            done += last - first


def query_blocks(layout: TreeLayout, block_tokens: int, window: int | None) -> tuple[QueryBlock, ...]:
    """The blocks of a layout, built at the first call and kept with it.

    Args:
        layout: the forest and the length of its past.
        block_tokens: tokens per block.
        window: attention window in tokens of depth, or None.
    """
    return layout.metadata(("query_blocks", block_tokens, window), lambda own: _build(own, block_tokens, window))


def _build(layout: TreeLayout, block_tokens: int, window: int | None) -> tuple[QueryBlock, ...]:
    past = layout.past_length
    end = np.concatenate([np.full(past, np.iinfo(np.int32).max, np.int32), layout.subtree_end.cpu().numpy()])
    depth = np.concatenate([np.arange(past, dtype=np.int32), layout.depth.cpu().numpy()])
    blocks = []
    for start in range(0, layout.num_tokens, block_tokens):
        stop = min(start + block_tokens, layout.num_tokens)
        query_depth = depth[past + start : past + stop]
        read = end[: past + start] > start
        if window is not None:
            read &= depth[: past + start] > query_depth.min() - window
        keys = np.concatenate([np.flatnonzero(read), np.arange(past + start, past + stop)])
        seen_by_all = (keys < past + start) & (end[keys] >= stop)
        if window is not None:
            seen_by_all &= query_depth.max() - depth[keys] < window
        masked_from = int(np.argmin(seen_by_all))
        blocks.append(_block(layout.device, past, start, stop, keys, masked_from, end, depth, window))
    return tuple(blocks)


def _block(
    device: torch.device,
    past: int,
    start: int,
    stop: int,
    keys: np.ndarray,
    masked_from: int,
    end: np.ndarray,
    depth: np.ndarray,
    window: int | None,
) -> QueryBlock:
    breaks = np.flatnonzero(np.diff(keys) != 1) + 1
    first = keys[np.concatenate([[0], breaks])]
    last = keys[np.concatenate([breaks - 1, [len(keys) - 1]])] + 1
    masked = keys[masked_from:]

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return QueryBlock(
        start=start,
        stop=stop,
        runs=tuple((int(a), int(b)) for a, b in zip(first, last, strict=True)),
        key_index=on_device(keys) if len(first) > MAX_RUNS else None,
        masked_from=masked_from,
        masked_token=on_device((masked - past).astype(np.int32)),
        masked_end=on_device(end[masked]),
        masked_depth=None if window is None else on_device(depth[masked]),
        query_depth=None if window is None else on_device(depth[past + start : past + stop]),
        window=window,
    )
