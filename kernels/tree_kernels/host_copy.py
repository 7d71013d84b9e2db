"""Asynchronous copies from the host to a device."""

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 256
"""Alignment of each array in bytes. Triton compiles another variant for pointers that are not multiples of 16."""


def moved(t: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`t` on `device` (itself if it is already there), copied asynchronously in stream order.

    A copy from pageable memory would wait for everything queued before it; a copy from pinned memory does not.
    """
    if t.device.type == "cpu" and torch.device(device).type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """An array as a tensor, copied like `moved`; on the CPU it may share the array's memory."""
    return moved(torch.from_numpy(np.ascontiguousarray(array)), device)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Copy arrays with one copy of one pinned buffer, which costs the host less than many small copies.

    The tensors keep dtypes and shapes and share one allocation.
    """
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    is_pinned = torch.device(device).type == "cuda"
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=is_pinned)
    of_host = buffer.numpy()
    for array, start in zip(arrays, starts[:-1], strict=True):
        of_host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    on_device = buffer.to(device, non_blocking=is_pinned)
    return [
        on_device[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts[:-1], strict=True)
    ]
