"""Host arrays onto a device without stopping the host."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copy an array, in stream order, while the host goes on.

    A copy from pageable memory would wait for everything queued before it; from pinned memory it does not.

    Args:
        array: of any dtype that torch knows.
        device: where it goes.

    Returns:
        The tensor; on the CPU it may share the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
