"""Processes of this machine, by what stands in their command lines, and what this one holds."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def command_lines() -> list[str]:
    """Of all other processes, also stopped ones."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                found.append((entry / "cmdline").read_text(errors="replace").replace("\0", " "))
    return found


def running(marker: str) -> list[str]:
    return [line for line in command_lines() if marker in line]


def own_descriptors() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        # The folder's own descriptor is gone.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Fail unless a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_gone(*markers: str) -> None:
    """Fail unless processes with these markers end within half a minute."""
    for marker in markers:
        wait_for(lambda marker=marker: not running(marker), 30)
