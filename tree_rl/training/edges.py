"""Which log-probs a batch needs, and where they go in its rows.

A token's log-prob belongs to the edge parent -> token (paper, "Derivation"): the last token of a segment predicts the
first token of each child. Legend: F flat tokens, N unique tokens, E edges, R logit rows, B rows.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tree_rl.training.host_copy import to_device
from tree_rl.tree.forest import Forest

UNWANTED = -1
MOST_MARKS_PER_VALUE = 64
"""Distinct values are found by marking unless there are so many more places than values that sorting is faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgePlan:
    """The logit rows to compute, the edges read from them, and the flat positions that receive each edge."""

    source_R: torch.Tensor
    """int64 [R], unique tokens whose hidden states are projected to the vocabulary."""
    row_of_edge_E: torch.Tensor
    """int64 [E], index into R."""
    target_E: torch.Tensor
    """int64 [E], token id that the edge predicts."""
    temperature_E: torch.Tensor
    """float32 [E], sampling temperature; an edge whose rows differ in temperature appears once per temperature."""
    edge_of_flat_F: torch.Tensor
    """int64 [F], index into E of the edge that starts at a flat position, -1 where none was asked for."""


def plan_edges(
    forest: Forest, wanted_F: np.ndarray, temperature_B: np.ndarray, device: torch.device | str = "cpu"
) -> EdgePlan:
    """Find the unique edges that start at the wanted flat positions.

    Args:
        forest: the rows of one micro-batch.
        wanted_F: bool [F]; position f asks for the log-prob of the next token of its row. The last position of a row
            has no next token and must be False.
        temperature_B: float32 [B], one per row.
        device: where the plan's tensors live.

    Raises:
        ValueError: a wanted position has no next token.
    """
    offsets = forest.row_index.offsets
    row_of_flat = np.repeat(np.arange(forest.num_rows), np.diff(offsets))
    last_of_row = offsets[1:] - 1
    if wanted_F[last_of_row].any():
        row = int(np.flatnonzero(wanted_F[last_of_row])[0])
        raise ValueError(f"row {row}: its last token predicts nothing, yet a log-prob is asked for there")
    flat = np.flatnonzero(wanted_F)
    child = forest.row_index.values[flat + 1].astype(np.int64)
    temperatures, temperature_index = np.unique(np.asarray(temperature_B, dtype=np.float32), return_inverse=True)
    kinds = max(len(temperatures), 1)
    kind = temperature_index[row_of_flat[flat]]
    edges, edge_of_wanted = _distinct(child * kinds + kind, forest.num_unique * kinds)
    edge_child, edge_kind = np.divmod(edges, kinds)
    sources, row_of_edge = _distinct(forest.parent[edge_child].astype(np.int64), forest.num_unique)
    edge_of_flat = np.full(forest.num_flat, UNWANTED, dtype=np.int64)
    edge_of_flat[flat] = edge_of_wanted

    def tensor(array: np.ndarray) -> torch.Tensor:
        return to_device(array, device)

    return EdgePlan(
        source_R=tensor(sources),
        row_of_edge_E=tensor(row_of_edge.astype(np.int64)),
        target_E=tensor(forest.input_ids[edge_child].astype(np.int64)),
        temperature_E=tensor(temperatures[edge_kind] if len(edges) else np.zeros(0, dtype=np.float32)),
        edge_of_flat_F=tensor(edge_of_flat),
    )


def _distinct(values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values, ascending, and the index of each value among them; values (int64) lie in [0, limit)."""
    if limit > MOST_MARKS_PER_VALUE * len(values):
        return np.unique(values, return_inverse=True)
    marks = np.zeros(limit, dtype=bool)
    marks[values] = True
    rank = np.cumsum(marks, dtype=np.int64) - 1
    return np.flatnonzero(marks), rank[values]


def scatter(values_E: torch.Tensor, index_F: torch.Tensor) -> torch.Tensor:
    """Spread per-edge values over flat positions; positions with index -1 read 0.

    Its gradient sums an edge over every row that reads it: the g_t weighting of the paper, nothing else does it.

    Args:
        values_E: [E].
        index_F: int64 [F] into `values_E`, -1 where nothing was computed.
    """
    return torch.cat([values_E, values_E.new_zeros(1)])[index_F]
