"""The prefix forest of a set of rows: reads rows, sorts them, builds the trie and lays it out depth first."""

from tree_rl.tree.forest.forest import Forest
from tree_rl.tree.forest.jagged import Jagged
from tree_rl.tree.forest.order import RowError
from tree_rl.tree.forest.trie import Segments

__all__ = ["Forest", "Jagged", "RowError", "Segments"]
