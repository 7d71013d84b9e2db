"""Pinned host memory for tensors that wait: copies leave on a stream of their own while the device computes on."""

import torch


class HostStore:
    """Moves tensors between a CUDA device and pinned host memory; on a CPU it keeps them where they are."""

    def __init__(self, device: torch.device) -> None:
        """Open a copy stream on `device`."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, on its way; the tensor's own memory may be freed at once."""
        if self._stream is None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        # The allocator hands the memory on only when the copy is done.
        tensor.record_stream(self._stream)
        return host

    def get(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on the device again, after every copy that is on its way."""
        if self._stream is None:
            return host
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return host.to(device, non_blocking=True)
