"""Kernels for training on prefix trees: tensors in, tensors out; torch (and Triton) only."""

from tree_kernels.edge_log_probs import edge_log_probs, logits_edge_log_probs
from tree_kernels.implementation import UnsupportedImplementation
from tree_kernels.tree_attention import chosen_implementation, tree_attention, unavailable_reason
from tree_kernels.tree_causal_conv1d import tree_causal_conv1d
from tree_kernels.tree_gated_delta_rule import tree_gated_delta_rule
from tree_kernels.tree_layout import TreeLayout
from tree_kernels.tree_state_space import tree_state_space

__all__ = [
    "TreeLayout",
    "UnsupportedImplementation",
    "chosen_implementation",
    "edge_log_probs",
    "logits_edge_log_probs",
    "tree_attention",
    "tree_causal_conv1d",
    "tree_gated_delta_rule",
    "tree_state_space",
    "unavailable_reason",
]
