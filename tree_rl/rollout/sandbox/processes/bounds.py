"""Limits on what all commands of a session use together, enforced by polling."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from tree_rl.rollout.sandbox.files.trees import use_of
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.processes.processes import children_of, descendants_of, die_first
from tree_rl.rollout.sandbox.processes.usage import usage_of

Found = TypeVar("Found")
TASKS_OF_SANDBOX = 8
"""Most processes that the sandbox adds to a command; they count too."""
LOOKS_AT_ENDLESS = 20
"""Number of checks that a command survives if the tree was already deeper than `MAX_DEPTH` when it started: such a tree
counts as infinite, so we cannot see it grow."""
LONGEST_SECONDS = 1.0
"""Longest time between two checks."""


class Pace:
    """Spaces out slow checks, so that they take a twentieth of the time; allows at least one a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def paced(self, look: Callable[[], Found]) -> Found | None:
        """What a check finds; None if none is due."""
        started = time.monotonic()
        if started < self._next:
            return None
        try:
            return look()
        finally:
            taken = time.monotonic() - started
            self._next = started + taken + min(20 * taken, LONGEST_SECONDS)


class SessionBounds:
    """Memory, processes and files of all commands of a sandbox.

    Args:
        limits: the sandbox's. A single command may get more time or processes, never more memory.
        has_namespace: True if each command has a process namespace, so that no process escapes its parents.
    """

    def __init__(self, limits: Limits, *, has_namespace: bool) -> None:
        self._limits = limits
        self._has_namespace = has_namespace
        self._looking = threading.Lock()
        self._disk_pace, self._processes_pace = Pace(), Pace()
        self._is_full = False
        self._allowed_bytes: float = limits.disk_bytes
        self._looks_at_endless = 0

    def begin(self, top: int) -> None:
        """Prepare for a command while no other runs. `top` is the open directory of the session's files."""
        # Files over the limit remain when their command is killed; the next command may delete them.
        self._allowed_bytes = max(use_of(top), self._limits.disk_bytes) if self._is_full else self._limits.disk_bytes
        self._looks_at_endless = 0

    def exceeded(self, top: int, running: Mapping[int, Limits]) -> str | None:
        """Message for the agent if the session exceeds a limit; None otherwise, and while another thread checks.

        `running` has each command's limits by the id of its outermost process.
        """
        if not self._looking.acquire(blocking=False):
            return None
        try:
            if self._disk_pace.paced(lambda: self._exceeds_disk(top)):
                return "disk limit exceeded"
            return self._processes_pace.paced(lambda: self._exceeds_together(running))
        finally:
            self._looking.release()

    def _exceeds_disk(self, top: int) -> bool:
        """True if the files are too large and have grown since the first command started; deleting stays possible."""
        used = use_of(top)
        self._is_full = used > self._limits.disk_bytes
        self._looks_at_endless += used == math.inf
        return self._is_full and (used > self._allowed_bytes or self._looks_at_endless > LOOKS_AT_ENDLESS)

    def _exceeds_together(self, running: Mapping[int, Limits]) -> str | None:
        process_ids = descendants_of(running)
        first: set[int] = set()
        if self._has_namespace:
            first = {child for process_id in running for child in children_of(process_id)}
        die_first(process_ids)
        memory_bytes, tasks = usage_of(process_ids, first_processes=first, near_bytes=self._limits.memory_bytes)
        if memory_bytes > self._limits.memory_bytes:
            return "memory limit exceeded"
        allowed = max((limits.processes for limits in running.values()), default=0)
        if tasks > allowed + TASKS_OF_SANDBOX * len(running):
            return "process limit exceeded"
        return None
