"""Windows of a forest for the kernels. Legend: N unique tokens, K taps, M = K - 1 + N inputs."""

from dataclasses import dataclass

import torch

from tree_kernels.host_copy import to_device_together
from tree_kernels.tree_causal_conv1d.windows import host_windows_of, readers
from tree_kernels.tree_layout import TreeLayout, kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowLists:
    """Inputs of each token and readers of each input, int32 on the layout's device."""

    input: torch.Tensor
    """[N, K], inputs of each token's window."""
    reader_start: torch.Tensor
    """[M + 1], first reader of each input."""
    reader: torch.Tensor
    """[N * K], token * K + tap of every read, sorted by input."""


@kept
def window_lists(layout: TreeLayout, taps: int) -> WindowLists:
    """The lists of a layout, built on the host; cached with it."""
    windows = host_windows_of(layout, taps)
    inputs, reader_start, reader = to_device_together((windows.input_NK, *readers(windows)), layout.device)
    return WindowLists(input=inputs, reader_start=reader_start, reader=reader)
