"""What the processes of a session use together: memory, processes. For machines where no control group can be made."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tree_rl.rollout.sandbox.processes.bubblewrap import SCRATCH, SCRATCH_BYTES
from tree_rl.rollout.sandbox.processes.processes import GONE, PROC

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NUM_THREADS, RSS_PAGES = 17, 21
"""Fields of /proc/PID/stat, counted from the state."""
INODE_BYTES = 4096
"""What an entry of a file system in memory counts at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What some processes use at a moment."""

    memory_bytes: int
    """Resident, shared parts counted once where `memory_bytes` is near a limit; with files kept in memory."""
    tasks: int
    """Processes and their threads."""


def usage_of(process_ids: Collection[int], *, first_processes: Iterable[int], near_bytes: int) -> Usage:
    """What processes use.

    Args:
        process_ids: of the session.
        first_processes: of their namespaces, whose file systems in memory count; empty where there are none.
        near_bytes: above it we look closer: a page that processes share counts once, one of a file on disk not at all.
    """
    tasks = resident = 0
    for process_id in process_ids:
        try:
            fields = (PROC / str(process_id) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except GONE:
            continue
        if fields[0] not in ("Z", "X"):
            tasks += int(fields[NUM_THREADS])
            resident += int(fields[RSS_PAGES]) * PAGE_BYTES
    in_files = sum(_scratch_bytes(process_id) for process_id in first_processes) + _memfd_bytes(process_ids)
    if resident + in_files <= near_bytes:
        return Usage(memory_bytes=resident + in_files, tasks=tasks)
    anonymous, shared = _proportional_bytes(process_ids)
    # Files in memory that are mapped are among the shared pages.
    return Usage(memory_bytes=anonymous + max(shared, in_files), tasks=tasks)


def _proportional_bytes(process_ids: Iterable[int]) -> tuple[int, int]:
    """Anonymous and shared memory, a page divided among the processes that have it."""
    anonymous = shared = 0
    for process_id in process_ids:
        try:
            lines = (PROC / str(process_id) / "smaps_rollup").read_text().splitlines()[1:]
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        except (*GONE, ValueError, IndexError):
            continue
        anonymous += kilobytes.get("Pss_Anon", kilobytes.get("Pss", 0)) * 1024
        shared += kilobytes.get("Pss_Shmem", 0) * 1024
    return anonymous, shared


def _scratch_bytes(first_process: int) -> int:
    """Use of the file systems in memory that a command's view has."""
    total = 0
    for place in SCRATCH:
        try:
            there = os.statvfs(PROC / str(first_process) / "root" / place.lstrip("/"))
        except GONE:
            continue
        # Before the view is built this is the machine's own folder, which has another size.
        if there.f_blocks * there.f_frsize == SCRATCH_BYTES:
            entries = there.f_files - there.f_ffree
            total += max((there.f_blocks - there.f_bfree) * there.f_frsize, entries * INODE_BYTES)
    return total


def _memfd_bytes(process_ids: Iterable[int]) -> int:
    """Size of nameless files in memory, each once, however many descriptors lead to it."""
    found: dict[tuple[int, int], int] = {}
    for process_id in process_ids:
        folder = f"{PROC}/{process_id}/fd"
        try:
            for name in os.listdir(folder):
                path = f"{folder}/{name}"
                if os.readlink(path).startswith("/memfd:"):
                    status = os.stat(path)
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
        except (*GONE, OSError):
            continue
    return sum(found.values())
