"""The namespace that verl uses like `torch.cuda`, for a machine without an accelerator.

Memory figures are those of this process.
"""

import os
import resource

import torch
from torch.cpu import Event, Stream, current_stream, device_count, set_device, stream, synchronize

__all__ = ["Event", "Stream", "current_stream", "device_count", "set_device", "stream", "synchronize"]


def do_nothing(*_args: object, **_kwargs: object) -> None:
    """Replaces calls without a meaning on a CPU, which has one device, no caching allocator and no streams."""


empty_cache = ipc_collect = set_per_process_memory_fraction = reset_peak_memory_stats = do_nothing


def is_available() -> bool:
    """Return False: without an accelerator verl skips its bookkeeping of memory and random states."""
    return False


def current_device() -> torch.device:
    """Return the CPU device, not an index: verl passes it to `tensor.to`, where an index means a CUDA device."""
    return torch.device("cpu")


def get_device_name(device: object = None) -> str:
    """Return the name used in memory snapshots."""
    return "cpu"


manual_seed = manual_seed_all = torch.manual_seed
get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state


def memory_allocated(device: object = None) -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def max_memory_allocated(device: object = None) -> int:
    """Return the peak resident bytes of this process since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return (available, total) bytes of host memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
