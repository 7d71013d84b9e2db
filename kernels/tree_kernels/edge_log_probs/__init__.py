"""Log-probs of the edges of a tree from hidden states or logits."""

from tree_kernels.edge_log_probs.api import edge_log_probs, logits_edge_log_probs

__all__ = ["edge_log_probs", "logits_edge_log_probs"]
