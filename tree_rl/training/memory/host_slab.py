"""One piece of pinned host memory per device, kept between calls.

torch's own pinned allocator rounds up to powers of two; here exactly the bytes that a run asks for are registered with
CUDA. Registering costs seconds, so the memory grows when a run needs more and never shrinks.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property

import torch


class HostSlab:
    """Bytes in host memory; beside a CPU they are not pinned."""

    def __init__(self, device: torch.device) -> None:
        """Own nothing yet."""
        self.device = device
        self.owner: object = None
        """Who reserved last; the bytes of earlier owners are void."""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @cached_property
    def stream(self) -> "torch.cuda.Stream | None":
        """For copies to and from it; None beside a CPU."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return len(self._bytes)

    def reserve(self, owner: object, num_bytes: int) -> None:
        """Give at least `num_bytes` to a new owner.

        Raises:
            MemoryError: the host does not have, or CUDA does not pin, so much memory.
        """
        self.owner = owner
        if num_bytes > self.num_bytes:
            self.release()
            self._bytes = _pages(num_bytes)
            if self.device.type == "cuda":
                self._register()

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor from `offset` bytes on."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[offset : offset + num_bytes].view(dtype).view(*shape)

    def release(self) -> None:
        """Give the memory back."""
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
    """The slab for one kind of content, shared by all models of the process: they run one after the other."""
    return HostSlab(device)


def _pages(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of fresh pages, huge where the system has them: pinning takes time by the page."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the host has no {num_bytes / 2**30:.1f} GiB left: {error}") from error
    with suppress(OSError):
        # A child of the process would get a copy of pinned pages.
        memory.madvise(mmap.MADV_DONTFORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
