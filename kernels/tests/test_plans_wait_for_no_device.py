"""Plans of recurrences and convolutions are made on the host and only written to the device: nothing waits for it.

A meta tensor stands for the device: whoever reads it fails.
"""

import numpy as np
import pytest
import torch

from tree_kernels.host_copy import ALIGNMENT, to_device_together
from tree_kernels.tree_causal_conv1d.triton_kernels.window_lists import window_lists
from tree_kernels.tree_gated_delta_rule.triton_kernels.device_plan import device_plan
from tree_kernels.tree_layout import TreeLayout

SUBTREE_END = np.array([7, 7, 4, 4, 7, 6, 7, 9, 9], dtype=np.int32)


def on_meta(*, on_host: np.ndarray | None) -> TreeLayout:
    return TreeLayout.from_subtree_end(torch.from_numpy(SUBTREE_END).to("meta"), on_host=on_host)


def test_what_the_host_knows_is_not_read_back() -> None:
    layout = on_meta(on_host=SUBTREE_END)
    plan, lists = device_plan(layout, 4, (3,)), window_lists(layout, 4)
    known = TreeLayout.from_subtree_end(torch.from_numpy(SUBTREE_END))
    assert plan.levels == device_plan(known, 4, (3,)).levels
    assert plan.token.shape == device_plan(known, 4, (3,)).token.shape
    assert lists.reader.shape == window_lists(known, 4).reader.shape
    assert {plan.token.device.type, plan.wanted_slot.device.type, lists.input.device.type} == {"meta"}


def test_what_only_the_device_knows_is_read_back() -> None:
    with pytest.raises(NotImplementedError):
        device_plan(on_meta(on_host=None), 4, ())


def test_arrays_copied_together_stay_what_they_were() -> None:
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.zeros(0, dtype=np.int64),
        np.arange(65, dtype=np.int64),
        np.array([True, False]),
        np.zeros((4, 0), dtype=np.int32),
    ]
    tensors = to_device_together(arrays, "cpu")
    for array, tensor in zip(arrays, tensors, strict=True):
        expected = torch.from_numpy(np.ascontiguousarray(array))
        assert tensor.dtype == expected.dtype and tensor.is_contiguous() and torch.equal(tensor, expected)
        assert tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0
    assert [t.device.type for t in to_device_together(arrays, "meta")] == ["meta"] * len(arrays)
    assert to_device_together([], "cpu") == []
