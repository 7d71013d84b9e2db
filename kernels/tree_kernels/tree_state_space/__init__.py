"""The recurrence of Mamba 2 over a prefix forest."""

from tree_kernels.tree_state_space.api import IMPLEMENTATIONS, tree_state_space

__all__ = ["IMPLEMENTATIONS", "tree_state_space"]
