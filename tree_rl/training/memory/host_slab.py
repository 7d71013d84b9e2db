"""One buffer of pinned host memory per device and kind of content, kept between calls.

torch's pinned allocator rounds up to powers of two; this registers with CUDA exactly the bytes that a run asks for.
Registering takes seconds, so the buffer grows when a run needs more and never shrinks.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property

import torch


class HostSlab:
    """Host memory, pinned unless the device is a CPU; empty until `reserve`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.owner: object = None
        """Owner of the last reservation; earlier owners must not use the memory any more."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @cached_property
    def stream(self) -> "torch.cuda.Stream | None":
        """Stream for copies to and from the slab; None on a CPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def num_bytes(self) -> int:
        """Size of the slab."""
        return len(self._bytes)

    def reserve(self, owner: object, num_bytes: int) -> None:
        """Give at least `num_bytes` to a new owner; raises MemoryError if the host or CUDA cannot provide them."""
        self.owner = owner
        if num_bytes > self.num_bytes:
            self.release()
            self._bytes = _pages(num_bytes)
            if self.device.type == "cuda":
                self._register()

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the slab's memory that starts at byte `offset`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[offset : offset + num_bytes].view(dtype).view(*shape)

    def release(self) -> None:
        """Unpin and free the memory."""
        if self.device.type == "cuda" and self.num_bytes:
            torch.cuda.synchronize(self.device)
            cuda = torch.cuda.cudart()
            error = cuda.cudaHostUnregister(self._bytes.data_ptr())
            if error != cuda.cudaError.success:
                raise RuntimeError(f"CUDA did not unpin {self.num_bytes} bytes of host memory: {error}")
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _register(self) -> None:
        cuda = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            error = cuda.cudaHostRegister(self._bytes.data_ptr(), self.num_bytes, 0)
        if error != cuda.cudaError.success:
            wanted, self._bytes = self.num_bytes, torch.empty(0, dtype=torch.uint8)
            raise MemoryError(
                f"CUDA cannot pin {wanted / 2**30:.1f} GiB of host memory (cudaHostRegister: "
                f"{error}); lower tree.max_tokens, or give the process more host memory"
            )


@cache
def host_slab(device: torch.device, content: str = "layer inputs") -> HostSlab:
    """The slab for one kind of content. All models of the process share it, because they run one after the other."""
    return HostSlab(device)


def _pages(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of new pages; huge pages if available, because pinning takes time per page."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host has no {num_bytes / 2**30:.1f} GiB left: {error}") from error
    with suppress(OSError):
        # A fork would copy pinned pages.
        memory.madvise(mmap.MADV_DONTFORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
