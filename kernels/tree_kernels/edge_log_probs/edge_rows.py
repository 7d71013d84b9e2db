"""Which rows of logits a set of edges needs: each (source, temperature) once, edges sorted by row.

Legend: E edges, R unique rows, r rows of a chunk, e edges of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """Consecutive rows and the edges that start there."""

    rows: slice
    """rows of the chunk"""
    edges: slice
    """edges of the chunk, in row order"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeRows:
    """Unique rows of the edges and the way from one to the other."""

    source: torch.Tensor
    """int64 [R], index of each row's hidden state (or given row of logits)"""
    row_temperature: torch.Tensor | float
    """[R, 1] temperature of each row, or one for all"""
    order: torch.Tensor
    """int64 [E], the edges in row order"""
    row: torch.Tensor
    """int64 [E], row of each edge, in row order"""
    target: torch.Tensor
    """int64 [E], target token of each edge, in row order"""
    chunks: tuple[Chunk, ...]
    """the rows in pieces"""

    @property
    def num_rows(self) -> int:
        """Number R of unique rows."""
        return self.source.shape[0]

    @property
    def num_edges(self) -> int:
        """Number E of edges."""
        return self.order.shape[0]

    def temperature(self, chunk: Chunk) -> torch.Tensor | float:
        """Temperature of a chunk's rows, to be broadcast over [r, V]."""
        return (
            self.row_temperature[chunk.rows] if isinstance(self.row_temperature, torch.Tensor) else self.row_temperature
        )

    def row_in_chunk(self, chunk: Chunk) -> torch.Tensor:
        """int64 [e], row of each edge of the chunk, counted from the chunk's first."""
        return self.row[chunk.edges] - chunk.rows.start


def edge_rows(
    edge_source: torch.Tensor,
    edge_target: torch.Tensor,
    temperature: torch.Tensor | float | None,
    chunk_rows: int,
    dtype: torch.dtype,
) -> EdgeRows:
    """Find the unique rows.

    Args:
        edge_source: integer [E].
        edge_target: integer [E].
        temperature: one for all, [E], or None for 1.
        chunk_rows: rows per chunk.
        dtype: of the computation.
    """
    source_E = edge_source.long()
    if isinstance(temperature, torch.Tensor):
        values, value_E = torch.unique(temperature.detach(), return_inverse=True)
        key_R, row_E = torch.unique(source_E * len(values) + value_E, return_inverse=True)
        divisor = max(len(values), 1)
        source_R = key_R // divisor
        temperature_R1: torch.Tensor | float = values.to(dtype)[key_R % divisor][:, None]
    else:
        source_R, row_E = torch.unique(source_E, return_inverse=True)
        temperature_R1 = 1.0 if temperature is None else float(temperature)
    row_E, order_E = torch.sort(row_E, stable=True)
    return EdgeRows(
        source=source_R,
        row_temperature=temperature_R1,
        order=order_E,
        row=row_E,
        target=edge_target.long()[order_E],
        chunks=tuple(_chunks(row_E, source_R.shape[0], chunk_rows)),
    )


def _chunks(row_E: torch.Tensor, num_rows: int, chunk_rows: int) -> Iterator[Chunk]:
    starts = list(range(0, num_rows, chunk_rows))
    stops = [*starts[1:], num_rows]
    edge_stops = torch.searchsorted(row_E, torch.tensor(stops, device=row_E.device)).tolist()
    edge_start = 0
    for start, stop, edge_stop in zip(starts, stops, edge_stops, strict=False):
        yield Chunk(rows=slice(start, stop), edges=slice(edge_start, edge_stop))
        edge_start = edge_stop
