"""Attention over a prefix forest."""

from tree_kernels.tree_attention.api import IMPLEMENTATIONS, chosen_implementation, tree_attention, unavailable_reason

__all__ = ["IMPLEMENTATIONS", "chosen_implementation", "tree_attention", "unavailable_reason"]
