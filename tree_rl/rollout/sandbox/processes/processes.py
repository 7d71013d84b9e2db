"""Finds the processes that commands start, and kills them so that none is left when a call returns."""

import logging
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

PROC = Path("/proc")
DEATH_SECONDS = 30.0
"""Longest wait for killed processes to end. Only one that hangs in the kernel needs more than milliseconds."""
CLOCK_SECONDS = 1.0
"""What a clock may be off: the kernel's for files runs in steps of milliseconds."""
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of reading /proc if a process ended meanwhile or belongs to another user."""


def children_of(process_id: int) -> set[int]:
    """Ids of a process's living children."""
    found: set[int] = set()
    try:
        for task in (PROC / str(process_id) / "task").iterdir():
            found |= {int(child) for child in (task / "children").read_text().split()}
    except FileNotFoundError:
        # The kernel does not list children, or the process ended.
        return {child for child in _all_processes() if _parent_of(child) == process_id}
    except GONE:
        pass
    return found


def descendants_of(process_ids: Iterable[int]) -> set[int]:
    """The processes and all their descendants whose chain of parents is alive."""
    found: set[int] = set()
    waiting = list(process_ids)
    while waiting:
        process_id = waiting.pop()
        if process_id not in found:
            found.add(process_id)
            waiting.extend(children_of(process_id))
    return found


def _status(process_id: int) -> dict[str, list[str]]:
    """Fields of /proc/PID/status, each split into words; empty if the process ended."""
    try:
        lines = (PROC / str(process_id) / "status").read_text(errors="replace").splitlines()
    except GONE:
        return {}
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


def _all_processes() -> Iterator[int]:
    return (int(name) for name in os.listdir(PROC) if name.isdigit())


def _parent_of(process_id: int) -> int:
    return int(_status(process_id).get("PPid", ["0"])[0])


def die_first(process_ids: Iterable[int]) -> None:
    """Have the kernel kill these processes first when memory is short. Repeated, as they can change it themselves."""
    for process_id in process_ids:
        path = PROC / str(process_id) / "oom_score_adj"
        try:
            if path.read_text().strip() != "1000":
                path.write_text("1000")
        except (*GONE, OSError):
            continue


def first_of_namespace(process_id: int, parent: int) -> int | None:
    """A descriptor for the first process of a process namespace; None if it died, even if its id was reused."""
    try:
        opened = os.pidfd_open(process_id)
    except ProcessLookupError:
        return None
    seen_as = _status(process_id).get("NSpid", [])
    if _parent_of(process_id) == parent or (len(seen_as) > 1 and seen_as[-1] == "1"):
        return opened
    os.close(opened)
    return None


def kill_and_wait(descriptors: Iterable[int]) -> bool:
    """Kill processes, given by descriptors that stay open, wait for their end, and return True if all are dead.

    The kernel ends a namespace's first process only after all others in the namespace.
    """
    poll = select.poll()
    waited = set()
    for descriptor in descriptors:
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            continue
        poll.register(descriptor, select.POLLIN)
        waited.add(descriptor)
    deadline = time.monotonic() + DEATH_SECONDS
    while waited and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            poll.unregister(descriptor)
            waited.discard(descriptor)
    return not waited


def kill_processes_in(folder: Path, *, since: float = 0.0) -> None:
    """Send SIGKILL to every process whose working directory or HOME is in a folder; none began before `since`."""
    for process_id in _all_processes():
        entry = PROC / str(process_id)
        try:
            # An entry of /proc is as old as its process, or younger. Reading it takes ten times as long as its age, and
            # sessions that end at once look at every process of the machine again and again.
            if entry.stat().st_mtime < since - CLOCK_SECONDS:
                continue
            places = [(entry / "cwd").readlink()]
            variables = (entry / "environ").read_bytes().split(b"\0")
            places += [Path(os.fsdecode(variable[5:])) for variable in variables if variable.startswith(b"HOME=")]
            if any(place.is_relative_to(folder) for place in places):
                os.kill(process_id, signal.SIGKILL)
        except (*GONE, OSError):
            continue
