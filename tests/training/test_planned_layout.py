"""A planned layout carries what the host knows of its attention, so that nothing on the device is read for it."""

import numpy as np

from tree_kernels.layout import TreeLayout
from tree_rl.training.tree_step import planned_layout
from tree_rl.tree.forest import Forest


def layout_of(*rows: list[int]) -> TreeLayout:
    forest = Forest.from_rows([np.array(row) for row in rows])
    return planned_layout(forest.subtree_end, "meta")


def test_rows_that_share_nothing_are_known_as_such() -> None:
    layout = layout_of([1, 2, 3], [4, 5])
    assert layout.chains is not None and layout.chains.longest == 3 and layout.chains.offsets.shape == (3,)
    assert layout.partial_share == 1


def test_a_forest_that_branches_has_no_rows() -> None:
    assert layout_of([1, 2, 3], [1, 5]).chains is None
