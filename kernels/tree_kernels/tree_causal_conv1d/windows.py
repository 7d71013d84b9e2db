"""The inputs in each token's window, planned once per layout on the host.

Inputs are numbered with the context first: 0 .. K-2 are the context, K-1+t is token t. Most windows are K consecutive
inputs; only the few tokens after a jump to another branch need a lookup.
Legend: N unique tokens, K taps, M = K - 1 + N inputs, R tokens after a jump.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_kernels.parents import parents_of
from tree_kernels.tree_layout import TreeLayout, kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostWindows:
    """Windows of a forest on the host."""

    input_NK: np.ndarray
    """int32 [N, K], inputs of each token's window, oldest first; the last is the token itself."""
    jumping_R: np.ndarray
    """int64 [R], tokens whose window is not consecutive: the K - 1 tokens from a jump to another branch on."""


@kept
def jumps_of(layout: TreeLayout, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens after a jump [R] and the inputs of their windows [R, K], int64 on the layout's device; cached with it."""
    windows = host_windows_of(layout, taps)
    input_RK = windows.input_NK[windows.jumping_R].astype(np.int64)
    return to_device(windows.jumping_R, layout.device), to_device(input_RK, layout.device)


@kept
def host_windows_of(layout: TreeLayout, taps: int) -> HostWindows:
    """Windows of K taps; cached with the layout."""
    parent, num_tokens, context = parents_of(layout), layout.num_tokens, taps - 1
    jumps = np.flatnonzero(parent != np.arange(-1, num_tokens - 1, dtype=np.int32))
    jumping_R = np.unique(jumps[:, None] + np.arange(context))
    jumping_R = jumping_R[jumping_R < num_tokens]
    input_NK = np.arange(num_tokens, dtype=np.int32)[:, None] + np.arange(taps, dtype=np.int32)
    before = np.concatenate([np.arange(-1, context - 1, dtype=np.int32), context + parent])
    at_R = context + jumping_R
    for tap in reversed(range(context)):
        at_R = before[at_R]
        input_NK[jumping_R, tap] = at_R
    return HostWindows(input_NK=input_NK, jumping_R=jumping_R)


def readers(windows: HostWindows) -> tuple[np.ndarray, np.ndarray]:
    """All reads, sorted by input, then by token.

    Returns:
        int32 [M + 1], first read of each input; int32 [N * K], token * K + tap of every read.
    """
    num_tokens, taps = windows.input_NK.shape
    read_input = windows.input_NK.ravel()
    reader_start = np.zeros(num_tokens + taps, dtype=np.int32)
    np.cumsum(np.bincount(read_input, minlength=num_tokens + taps - 1), out=reader_start[1:])
    return reader_start, np.argsort(read_input, kind="stable").astype(np.int32)
