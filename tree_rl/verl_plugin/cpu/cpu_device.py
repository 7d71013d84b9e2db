"""The `torch.<device>` namespace verl expects from a platform, for a machine without an accelerator.

verl calls it the way it calls `torch.cuda`. `is_available()` is False: there is no accelerator, so verl's memory
bookkeeping and random-state snapshots skip it. Memory figures are those of this process.
"""

import os
import resource

import torch
from torch.cpu import Event, Stream, current_stream, stream

__all__ = ["Event", "Stream", "current_stream", "stream"]


def is_available() -> bool:
    """Return False: no accelerator is present."""
    return False


def device_count() -> int:
    """Return 1: one worker process owns one share of the CPU."""
    return 1


def current_device() -> torch.device:
    """Return the CPU device; verl passes it to `tensor.to`, where an index would name a CUDA device."""
    return torch.device("cpu")


def set_device(device: object) -> None:
    """Do nothing: there is one CPU device."""


def get_device_name(device: object = None) -> str:
    """Return the name used in memory snapshots."""
    return "cpu"


def get_device_capability(device: object = None) -> tuple[None, None]:
    """Return no compute capability."""
    return None, None


def synchronize(device: object = None) -> None:
    """Do nothing: CPU operators finish before they return."""


def empty_cache() -> None:
    """Do nothing: the allocator is the C library's."""


def ipc_collect() -> None:
    """Do nothing: there are no inter-process handles."""


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    """Do nothing: the process may use all of the host memory."""


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.manual_seed(seed)


manual_seed_all = manual_seed
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


def reset_peak_memory_stats(device: object = None) -> None:
    """Do nothing: the kernel's peak cannot be reset."""


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return (available, total) bytes of host memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
