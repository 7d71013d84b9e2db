"""Log-probs of the edges of a tree from hidden states or logits."""

from tree_kernels.edge_log_probs.api import (
    chosen_implementation,
    edge_log_probs,
    edge_log_probs_of_rows,
    logits_edge_log_probs,
    logits_edge_log_probs_of_rows,
    unavailable_reason,
)
from tree_kernels.edge_log_probs.edge_rows import EdgeRows, rows_of_edges
from tree_kernels.edge_log_probs.edge_values import EdgeValues

__all__ = [
    "EdgeRows",
    "EdgeValues",
    "chosen_implementation",
    "edge_log_probs",
    "edge_log_probs_of_rows",
    "logits_edge_log_probs",
    "logits_edge_log_probs_of_rows",
    "rows_of_edges",
    "unavailable_reason",
]
