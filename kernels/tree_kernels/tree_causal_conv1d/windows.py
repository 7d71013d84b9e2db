"""Which inputs each token's window holds, built once per layout on the host.

Inputs are numbered with the context in front: 0 .. K-2 are the context, K-1+t is token t. Most windows are runs of
neighbours, so that only the few tokens near a jump to another branch are looked up.
Legend: N unique tokens, K taps, M = K - 1 + N inputs, R tokens near a jump.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tree_kernels.host_copy import to_device
from tree_kernels.layout import TreeLayout
from tree_kernels.parents import parents_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HostWindows:
    """Windows of a forest on the host."""

    input_NK: np.ndarray
    """int32 [N, K], inputs of each token's window, oldest first; the last is the token itself"""
    jumping_R: np.ndarray
    """int64 [R], tokens whose window is no run of neighbours: fewer than K tokens behind a jump to another branch"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Windows:
    """The same on the layout's device, both int64."""

    input_NK: torch.Tensor
    jumping_R: torch.Tensor


def windows_of(layout: TreeLayout, taps: int) -> Windows:
    """The windows of a layout, built at the first call and kept with it."""

    def build(own: TreeLayout) -> Windows:
        windows = host_windows_of(own, taps)
        input_NK = to_device(windows.input_NK.astype(np.int64), own.device)
        return Windows(input_NK=input_NK, jumping_R=to_device(windows.jumping_R, own.device))

    return layout.metadata(("conv_windows", taps), build)


def host_windows_of(layout: TreeLayout, taps: int) -> HostWindows:
    """`host_windows` of a layout, built at the first call and kept with it."""
    return layout.metadata(("conv_host_windows", taps), lambda own: host_windows(parents_of(own), taps))


def host_windows(parent: np.ndarray, taps: int) -> HostWindows:
    """Windows from parents.

    Args:
        parent: int32 [N], -1 at roots.
        taps: K.
    """
    num_tokens, context = len(parent), taps - 1
    jumps = np.flatnonzero(parent != np.arange(-1, num_tokens - 1, dtype=np.int32))
    jumping_R = np.unique(jumps[:, None] + np.arange(context))
    jumping_R = jumping_R[jumping_R < num_tokens]
    input_NK = _diagonals(num_tokens, taps, step=1)
    before = np.concatenate([np.arange(-1, context - 1, dtype=np.int32), context + parent])
    at_R = context + jumping_R
    for tap in reversed(range(context)):
        at_R = before[at_R]
        input_NK[jumping_R, tap] = at_R
    return HostWindows(input_NK=input_NK, jumping_R=jumping_R)


def readers(windows: HostWindows) -> tuple[np.ndarray, np.ndarray]:
    """All reads in the order of the inputs they read, those of one input in the order of the tokens that read it.

    Inputs far from any jump, and what reads them, form runs that are copied as they are.

    Returns:
        int32 [M + 1], first read of each input; int32 [N * K], token * K + tap of every read.
    """
    input_NK = windows.input_NK
    num_tokens, taps = input_NK.shape
    num_inputs = num_tokens + taps - 1
    column_K = np.arange(taps)
    regular_RK = windows.jumping_R[:, None] + column_K
    place, tap = np.nonzero(input_NK[windows.jumping_R] != regular_RK)
    moved_to = input_NK[windows.jumping_R[place], tap]
    # Inputs that gain or lose a reader, and those at either end, which have fewer than K.
    edge = np.arange(min(taps - 1, num_inputs))
    near = np.unique(np.concatenate([regular_RK[place, tap], moved_to, edge, num_inputs - 1 - edge]))
    of_near, read = _reads_of(near, windows, (moved_to, windows.jumping_R[place] * taps + tap))
    reads_M = np.full(num_inputs, taps, dtype=np.int32)
    reads_M[near] = np.bincount(of_near, minlength=len(near))
    reader_start = np.zeros(num_inputs + 1, dtype=np.int32)
    np.cumsum(reads_M, out=reader_start[1:])
    # Input m of a run is read by the tokens m - K + 1 to m.
    runs = _diagonals(num_inputs, taps, step=taps - 1, inner=taps, first=-((taps - 1) ** 2)).ravel()
    group = np.flatnonzero(np.diff(near, prepend=-2, append=num_inputs + 1) > 1)
    first_read = np.searchsorted(of_near, group).tolist()
    pieces, done = [], 0
    for first, last, start, stop in zip(
        near[group[:-1]].tolist(), near[group[1:] - 1].tolist(), first_read[:-1], first_read[1:], strict=True
    ):
        pieces += [runs[done * taps : first * taps], read[start:stop]]
        done = last + 1
    return reader_start, np.concatenate([*pieces, runs[done * taps :]])


def _reads_of(
    near: np.ndarray, windows: HostWindows, moved: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """All reads of some inputs, in order: the place of the input in `near`, and the int32 token * K + tap."""
    num_tokens, taps = windows.input_NK.shape
    token, tap = near[:, None] - np.arange(taps), np.broadcast_to(np.arange(taps), (len(near), taps))
    exists = (token >= 0) & (token < num_tokens)
    place, column = np.nonzero(exists & (windows.input_NK[np.where(exists, token, 0), tap] == near[:, None]))
    of_near = np.concatenate([place, np.searchsorted(near, moved[0])])
    read = np.concatenate([token[place, column] * taps + column, moved[1]])
    order = np.lexsort((read, of_near))
    return of_near[order], read[order].astype(np.int32)


def _diagonals(rows: int, columns: int, *, step: int, inner: int = 1, first: int = 0) -> np.ndarray:
    """int32 [rows, columns], first + inner * row + step * column; by columns, which are the long side."""
    values = np.empty((rows, columns), dtype=np.int32)
    row = np.arange(first, first + inner * rows, inner, dtype=np.int32)
    for column in range(columns):
        np.add(row, step * column, out=values[:, column])
    return values
