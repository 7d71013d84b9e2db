"""Decides which rank trains which rows of a mini-batch. A group stays on one rank unless splitting it is faster."""

from tree_rl.cost.balance.cell_layout import MOST_TRIALS, CellLayout, lay_out_cell
from tree_rl.cost.balance.paths import GroupPaths

__all__ = ["MOST_TRIALS", "CellLayout", "GroupPaths", "lay_out_cell"]
