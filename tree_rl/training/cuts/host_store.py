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

    def evict(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor's memory to the host while others keep references to it; returns what `restore` needs."""
        host = self.put(tensor.detach())
        if self._stream is not None:
            tensor.untyped_storage().resize_(0)
        return host

    def restore(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Give an evicted tensor its memory and values back."""
        if self._stream is None:
            return
        torch.cuda.current_stream(tensor.device).wait_stream(self._stream)
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        # .data: the values are the old ones, so autograd must not see a change of version.
        tensor.data.copy_(host, non_blocking=True)
