"""What a tree is: forest, layout, weights, overlap, packing and drawing, in NumPy alone."""

from tree_rl.tree.forest import Forest
from tree_rl.tree.jagged import Jagged
from tree_rl.tree.rows import RowError
from tree_rl.tree.trie import Segments

__all__ = ["Forest", "Jagged", "RowError", "Segments"]
