"""What a tree is: forest, layout, weights, overlap, packing and drawing, in NumPy alone."""

from tree_rl.tree.cost import ModelShape, forest_cost, row_cost
from tree_rl.tree.forest import Forest
from tree_rl.tree.forest.jagged import Jagged
from tree_rl.tree.forest.rows import RowError
from tree_rl.tree.forest.trie import Segments
from tree_rl.tree.packing import MicroBatch, Packing, pack_groups
from tree_rl.tree.report.branching import Branch, BranchCause, classify_branches, count_causes
from tree_rl.tree.report.drawing import draw_svg, draw_text
from tree_rl.tree.report.overlap import Overlap, measure_forest, measure_trees
from tree_rl.tree.weights import PathWeighting, path_weights, row_token_weights, unique_token_weights

__all__ = [
    "Branch",
    "BranchCause",
    "Forest",
    "Jagged",
    "MicroBatch",
    "ModelShape",
    "Overlap",
    "Packing",
    "PathWeighting",
    "RowError",
    "Segments",
    "classify_branches",
    "count_causes",
    "draw_svg",
    "draw_text",
    "forest_cost",
    "measure_forest",
    "measure_trees",
    "pack_groups",
    "path_weights",
    "row_cost",
    "row_token_weights",
    "unique_token_weights",
]
