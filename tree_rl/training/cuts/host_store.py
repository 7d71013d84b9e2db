"""Pinned host memory for tensors that wait; a separate stream copies them while the device computes."""

import torch


class HostStore:
    """Moves tensors between a CUDA device and pinned host memory; for a CPU device it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to host memory and return it; the caller may free the tensor at once."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        # The allocator reuses the memory only after the copy.
        tensor.record_stream(self._stream)
        return host

    def get(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on the device again; the copy waits for all pending `put` copies."""
        if self._stream is None:
            return host
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return host.to(device, non_blocking=True)
