"""Which inputs each token's window holds, built once per layout on the host.

Inputs are numbered with the context in front: 0 .. K-2 are the context, K-1+t is token t.
Legend: N unique tokens, K taps, R tokens near a jump.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_kernels.layout import TreeLayout
from tree_kernels.parents import parents_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Windows:
    """Windows of a forest on its device."""

    input_NK: torch.Tensor
    """int64 [N, K], inputs of each token's window, oldest first; the last is the token itself"""
    jumping_R: torch.Tensor
    """int64 [R], tokens whose window is no run of neighbours: fewer than K tokens behind a jump to another branch"""


def windows_of(layout: TreeLayout, taps: int) -> Windows:
    """The windows of a layout, built at the first call and kept with it."""
    return layout.metadata(("conv_windows", taps), lambda own: _build(own, taps))


def window_inputs_of(layout: TreeLayout, taps: int) -> np.ndarray:
    """`window_inputs` of a layout, built at the first call and kept with it."""
    return layout.metadata(("conv_window_inputs", taps), lambda own: window_inputs(parents_of(own), taps))


def window_inputs(parent: np.ndarray, taps: int) -> np.ndarray:
    """int64 [N, K], inputs of each token's window, oldest first.

    Args:
        parent: int32 [N], -1 at roots.
        taps: K.
    """
    context = taps - 1
    before = np.concatenate([np.arange(context) - 1, np.where(parent >= 0, context + parent, context - 1)])
    columns = [context + np.arange(len(parent))]
    for _ in range(context):
        columns.append(before[columns[-1]])
    return np.stack(columns[::-1], axis=1)


def _build(layout: TreeLayout, taps: int) -> Windows:
    inputs = window_inputs_of(layout, taps)
    jumping = np.flatnonzero(inputs[:, 0] != np.arange(len(inputs)))
    return Windows(input_NK=to_device(inputs, layout.device), jumping_R=to_device(jumping, layout.device))
