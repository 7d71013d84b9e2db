"""Inputs of a plan equal those that are checked and derived from the mask alone, and carry what the host knows."""

import numpy as np
import pytest
import torch

from tree_kernels.tree_attention.fa4.leaf_rows import leaf_rows
from tree_kernels.tree_layout import TreeLayout
from tree_rl.models.tree_inputs import TreeInputs
from tree_rl.tree.forest import Forest


def forest_of(*rows: list[int]) -> Forest:
    return Forest.from_rows([np.array(row) for row in rows])


@pytest.mark.parametrize("past", [0, 7])
def test_inputs_are_those_of_the_checked_mask(past: int) -> None:
    forest = forest_of([1, 2, 3, 4], [1, 2, 9], [5, 6], [5, 6, 7])
    inputs = TreeInputs.of_arrays(forest.input_ids, forest.position + past, forest.subtree_end, "cpu", past_length=past)
    checked = TreeLayout.from_subtree_end(torch.from_numpy(forest.subtree_end), past_length=past)
    for name in ("subtree_end", "position", "depth"):
        mine, theirs = getattr(inputs.layout, name), getattr(checked, name)
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype == torch.int32
    assert inputs.layout.past_length == past
    assert inputs.input_ids_1n.tolist() == [forest.input_ids.tolist()]
    assert inputs.position_ids_1n.tolist() == [checked.depth.tolist()]
    assert inputs.input_ids_1n.dtype == inputs.position_ids_1n.dtype == torch.int64


def test_nothing_on_the_device_is_read_for_what_the_host_knows() -> None:
    layout = TreeInputs.from_forest(forest_of([1, 2, 3], [4, 5]), "meta").layout
    assert layout.device.type == "meta" and layout.partial_share == 1
    assert layout.subtree_end_on_host().tolist() == [3, 3, 3, 5, 5]
    rows = leaf_rows(layout, most_keys=1, fewest_queries=1)
    assert rows is not None and rows.longest_key == 3 and rows.query_offsets.shape == (3,)
