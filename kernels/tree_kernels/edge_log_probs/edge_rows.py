"""The rows of logits that a set of edges needs: one per distinct (source, temperature), and the edges sorted by row.

Legend: E edges, U unique rows, r rows of a chunk, e edges of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from tree_kernels.host_copy import moved

MOST_MARKS_PER_VALUE = 64
"""Limit on the value range, in multiples of the number of values, up to which a bitmap beats sorting in `distinct`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """Consecutive rows and the edges that start there, in row order."""

    rows: slice
    edges: slice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeRows:
    """Unique rows of a set of edges, and the edges sorted by row.

    Building it on the CPU and moving it with `to` needs no synchronisation with the accelerator.
    """

    source: torch.Tensor
    """int64 [U], ascending: index of each row's hidden state (or given row of logits)."""
    sources_repeat: bool
    """True if a source may have several rows, one per temperature."""
    row_temperature: torch.Tensor | float
    """[U, 1], temperature of each row, or one number for all."""
    order: torch.Tensor
    """int64 [E], edge indices in row order."""
    row: torch.Tensor
    """int64 [E], row of each edge, in row order."""
    target: torch.Tensor
    """int64 [E], target token of each edge, in row order."""
    first_edge: torch.Tensor
    """int64 [U + 1], first edge of each row, in row order."""

    @property
    def num_rows(self) -> int:
        """U, number of unique rows."""
        return self.source.shape[0]

    @property
    def num_edges(self) -> int:
        """E, number of edges."""
        return self.order.shape[0]

    def to(self, device: torch.device | str) -> "EdgeRows":
        """The same rows on `device`, copied asynchronously."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {n: moved(t, device) for n, t in given.items() if isinstance(t, torch.Tensor)}
        return replace(self, **tensors)

    def chunks(self, chunk_rows: int) -> Iterator[Chunk]:
        """The rows in chunks of `chunk_rows`; reads `first_edge` on the host."""
        starts = range(0, self.num_rows, chunk_rows)
        stops = [*starts[1:], self.num_rows]
        bounds = self.first_edge[[0, *stops]].tolist()
        for number, (start, stop) in enumerate(zip(starts, stops, strict=False)):
            yield Chunk(rows=slice(start, stop), edges=slice(bounds[number], bounds[number + 1]))

    def temperature(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor | float:
        """Temperature of a chunk's rows, broadcastable to [r, V]."""
        temperature = self.row_temperature
        return temperature if isinstance(temperature, float) else temperature[chunk.rows].to(dtype)

    def row_in_chunk(self, chunk: Chunk) -> torch.Tensor:
        """int64 [e], row of each edge, relative to the chunk's first row."""
        return self.row[chunk.edges] - chunk.rows.start


def rows_of_edges(
    edge_source: torch.Tensor, edge_target: torch.Tensor, temperature: torch.Tensor | float | None
) -> EdgeRows:
    """Find the unique rows of integer edges [E]; the temperature is a number for all, [E], or None for 1."""
    source_E = edge_source.long()
    row_temperature: torch.Tensor | float = 1.0
    sources_repeat = False
    if isinstance(temperature, torch.Tensor):
        values, value_E = torch.unique(temperature.detach(), return_inverse=True)
        kinds = max(len(values), 1)
        key_U, row_E = _distinct_of(source_E * kinds + value_E)
        source_U = key_U // kinds
        sources_repeat = kinds > 1
        # Only on the CPU, because reading the value from an accelerator would synchronise.
        is_known = kinds == 1 and values.device.type == "cpu" and len(values) == 1
        row_temperature = float(values[0]) if is_known else values[key_U % kinds][:, None]
    else:
        source_U, row_E = _distinct_of(source_E)
        row_temperature = 1.0 if temperature is None else float(temperature)
    order_E = _stable_order(row_E)
    row_E = row_E[order_E]
    ends_before = torch.zeros(source_U.shape[0] + 1, dtype=torch.int64, device=row_E.device)
    ends_before.index_add_(0, row_E + 1, torch.ones_like(row_E))
    return EdgeRows(
        source=source_U,
        sources_repeat=sources_repeat,
        row_temperature=row_temperature,
        order=order_E,
        row=row_E,
        target=edge_target.long()[order_E],
        first_edge=ends_before.cumsum(0),
    )


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique` with inverse for non-negative int64 values."""
    limit = int(values.max(initial=0)) + 1
    if limit > MOST_MARKS_PER_VALUE * len(values):
        return np.unique(values, return_inverse=True)
    is_present = np.zeros(limit, dtype=bool)
    is_present[values] = True
    rank = np.cumsum(is_present, dtype=np.int64) - 1
    return np.flatnonzero(is_present), rank[values]


def _distinct_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if values.device.type != "cpu":
        return torch.unique(values, return_inverse=True)
    found, inverse = distinct(values.numpy())
    return torch.from_numpy(found), torch.from_numpy(inverse)


def _stable_order(values: torch.Tensor) -> torch.Tensor:
    """int64, stable ascending order; on the CPU NumPy's merge sort is fast because edges come in few sorted runs."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), kind="stable"))
    return torch.sort(values, stable=True).indices
