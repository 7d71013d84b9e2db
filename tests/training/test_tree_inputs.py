"""Inputs of a forest carry what the host knows."""

import numpy as np

from tree_kernels.tree_attention.fa4.leaf_rows import leaf_rows
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.tree.forest import Forest


def forest_of(*rows: list[int]) -> Forest:
    return Forest.from_rows([np.array(row) for row in rows])


def test_nothing_on_the_device_is_read_for_what_the_host_knows() -> None:
    layout = TreeInputs.from_forest(forest_of([1, 2, 3], [4, 5]), "meta").layout
    assert layout.device.type == "meta" and layout.partial_share == 1
    assert layout.subtree_end_on_host().tolist() == [3, 3, 3, 5, 5]
    rows = leaf_rows(layout, most_keys=1, fewest_queries=1)
    assert rows is not None and rows.longest_key == 3 and rows.query_offsets.shape == (3,)
