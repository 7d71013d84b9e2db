"""The bounds of a session: what all its commands use together, kept by the kernel or by looking."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tree_rl.rollout.sandbox.files.trees import use_of
from tree_rl.rollout.sandbox.processes.control_group import GROUP_NOTE, TASKS_OF_SANDBOX, ControlGroup, parent_group
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.processes.processes import children_of, descendants_of, die_first
from tree_rl.rollout.sandbox.processes.usage import usage_of

Looked = TypeVar("Looked")
Found = TypeVar("Found")
LOOKS_AT_ENDLESS = 20
"""How often a command may be seen beside a tree that was too deep when it began: that one cannot be seen to grow."""
LONGEST_SECONDS = 1.0
"""Between two looks."""


class Pace:
    """Looks more rarely where looking takes long, so that it costs a twentieth of the time; at least once a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether to look now."""
        return time.monotonic() >= self._next

    def timed(self, look: Callable[[Looked], Found], at: Looked) -> Found:
        """Look."""
        begun = time.monotonic()
        try:
            return look(at)
        finally:
            taken = time.monotonic() - begun
            self._next = begun + taken + min(20 * taken, LONGEST_SECONDS)


class SessionBounds:
    """Memory, processes and files of all commands of a sandbox.

    Args:
        limits: the sandbox's. A command may have more time or processes, but no session more memory.
        has_namespace: whether each command has a process namespace, so that no process leaves its parents.
        folder: where we note the control group; no command may write there.
    """

    def __init__(self, limits: Limits, *, has_namespace: bool, folder: Path) -> None:
        self._limits = limits
        self._group: ControlGroup | None = None
        self._kills = 0
        self._has_namespace = has_namespace
        self._looking = threading.Lock()
        self._disk_pace, self._processes_pace = Pace(), Pace()
        self._is_full = False
        self._allowed_bytes: float = limits.disk_bytes
        self._looks_at_endless = 0
        parent = parent_group()
        if parent is not None:
            self._group = ControlGroup(parent, memory_bytes=limits.memory_bytes)
            (folder / GROUP_NOTE).write_text(str(self._group.path))

    @property
    def group(self) -> Path | None:
        """The control group that commands join."""
        return None if self._group is None else self._group.path

    def begin(self, top: int, running: Sequence[Limits]) -> None:
        """Prepare for a command.

        Args:
            top: open directory of its files.
            running: its limits, and those of commands that run already.
        """
        if len(running) == 1:
            # Files that are too large stay when their command is killed; the next one may delete them.
            self._allowed_bytes = (
                max(use_of(top), self._limits.disk_bytes) if self._is_full else self._limits.disk_bytes
            )
            self._looks_at_endless = 0
        if self._group is not None:
            self._group.allow(tasks=max(limits.processes for limits in running), commands=len(running))

    def exceeded(self, top: int, running: Mapping[int, Limits]) -> str | None:
        """Which limit the session exceeds, as the agent reads it; None also while another thread looks.

        Args:
            top: open directory of its files.
            running: limits by the outermost process of a command.
        """
        if not self._looking.acquire(blocking=False):
            return None
        try:
            if self._disk_pace.is_due() and self._disk_pace.timed(self._exceeds_disk, top):
                return "disk limit exceeded"
            if self._processes_pace.is_due():
                return self._processes_pace.timed(self._exceeds_together, running)
            return None
        finally:
            self._looking.release()

    def _exceeds_disk(self, top: int) -> bool:
        """Whether the files are too large, and more than when the first command began: one who deletes may go on."""
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
        if self._group is not None:
            return None
        used = usage_of(process_ids, first_processes=first, near_bytes=self._limits.memory_bytes)
        if used.memory_bytes > self._limits.memory_bytes:
            return "memory limit exceeded"
        allowed = max((limits.processes for limits in running.values()), default=0)
        if used.tasks > allowed + TASKS_OF_SANDBOX * len(running):
            return "process limit exceeded"
        return None

    def killed_for(self) -> str | None:
        """Why the kernel killed a command since the last call; None if it did not."""
        if self._group is None:
            return None
        before, self._kills = self._kills, self._group.kills_for_memory()
        return "memory limit exceeded" if self._kills > before else None

    def kill_all(self) -> None:
        """Kill what is in the control group."""
        if self._group is not None:
            self._group.kill()

    def close(self) -> None:
        """Remove the control group. Idempotent."""
        if self._group is not None:
            self._group.close()
