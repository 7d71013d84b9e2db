"""The short causal convolution over a prefix forest."""

from tree_kernels.tree_causal_conv1d.api import ACTIVATIONS, IMPLEMENTATIONS, tree_causal_conv1d

__all__ = ["ACTIVATIONS", "IMPLEMENTATIONS", "tree_causal_conv1d"]
