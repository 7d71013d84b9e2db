"""The gated delta rule over a prefix forest."""

from tree_kernels.tree_gated_delta_rule.api import IMPLEMENTATIONS, tree_gated_delta_rule

__all__ = ["IMPLEMENTATIONS", "tree_gated_delta_rule"]
