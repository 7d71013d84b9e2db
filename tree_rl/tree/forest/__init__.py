"""The prefix forest of a set of rows: reading rows, sorting them, the trie and its layout in depth-first order."""

from tree_rl.tree.forest.forest import Forest
from tree_rl.tree.forest.jagged import Jagged
from tree_rl.tree.forest.rows import RowError
from tree_rl.tree.forest.trie import Segments

__all__ = ["Forest", "Jagged", "RowError", "Segments"]
