"""Host arrays onto a device without stopping the host."""

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 256
"""Bytes; Triton compiles anew for pointers that are no multiples of 16, and an allocation's own are of 512."""


def moved(t: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`t` on `device` (itself if it is there already), copied in stream order while the host goes on.

    A copy from pageable memory would wait for everything queued before it; from pinned memory it does not.
    """
    if t.device.type == "cpu" and torch.device(device).type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """An array of any dtype that torch knows, as `moved` copies it; on the CPU it may share the array's memory."""
    return moved(torch.from_numpy(np.ascontiguousarray(array)), device)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Copy arrays by one copy of one pinned buffer, where many small ones would cost the host a call each.

    The tensors keep dtypes, which torch must know, and shapes; they share one allocation.
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
