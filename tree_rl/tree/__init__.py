"""Prefix trees of rows: forest, layout, weights, partitions, overlap and drawings. Needs NumPy only."""

from tree_rl.tree.forest import Forest, Jagged, RowError, Segments
from tree_rl.tree.packing import pack_groups
from tree_rl.tree.report.overlap import Overlap, measure_forest
from tree_rl.tree.report.svg_drawing import draw_svg
from tree_rl.tree.report.text_drawing import draw_text
from tree_rl.tree.weights import once_per_token_weights, tree_mean_weights

__all__ = [
    "Forest",
    "Jagged",
    "Overlap",
    "RowError",
    "Segments",
    "draw_svg",
    "draw_text",
    "measure_forest",
    "once_per_token_weights",
    "pack_groups",
    "tree_mean_weights",
]
