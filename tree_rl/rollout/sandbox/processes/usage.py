"""Memory and number of a session's processes."""

import os
from collections.abc import Collection, Iterable

from tree_rl.rollout.sandbox.processes.bubblewrap import SCRATCH, SCRATCH_BYTES
from tree_rl.rollout.sandbox.processes.processes import GONE, PROC

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NUM_THREADS, RSS_PAGES = 17, 21
"""Positions of fields in /proc/PID/stat, counted from the state."""
INODE_BYTES = 4096
"""Smallest size that an entry of a file system in memory counts."""


def usage_of(process_ids: Collection[int], *, first_processes: Iterable[int], near_bytes: int) -> tuple[int, int]:
    """Measure a session's processes.

    Args:
        process_ids: all processes of the session.
        first_processes: first process of each namespace, whose file systems in memory count; empty without namespaces.
        near_bytes: above it we measure exactly: a shared page counts once, a page of a file on disk not at all.

    Returns:
        Bytes of resident memory and files in memory; and the number of threads.
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
        return resident + in_files, tasks
    anonymous, shared = _proportional_bytes(process_ids)
    # The shared pages include mapped files in memory, so the two must not be added.
    return anonymous + max(shared, in_files), tasks


def _proportional_bytes(process_ids: Iterable[int]) -> tuple[int, int]:
    """Anonymous and shared memory in bytes, each page divided among the processes that map it."""
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
    """Bytes used in the file systems in memory that a command sees."""
    total = 0
    for place in SCRATCH:
        try:
            there = os.statvfs(PROC / str(first_process) / "root" / place.lstrip("/"))
        except GONE:
            continue
        # Before bubblewrap has mounted it, this is the machine's folder, which has another size.
        if there.f_blocks * there.f_frsize == SCRATCH_BYTES:
            entries = there.f_files - there.f_ffree
            total += max((there.f_blocks - there.f_bfree) * there.f_frsize, entries * INODE_BYTES)
    return total


def _memfd_bytes(process_ids: Iterable[int]) -> int:
    """Size of all memfd files, each counted once."""
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
