"""A control group (version 2) for all commands of a session: memory and processes together, and one kill for all.

Needs a group above this process's that distributes `memory` and `pids` and that this process may extend: root on a
machine, or a delegated systemd unit. Where there is none, `usage` watches instead.
"""

import contextlib
import logging
import os
import secrets
import time
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

CONTROLLERS = ("memory", "pids")
PREFIX = "tree-rl-"
TASKS_OF_SANDBOX = 8
"""Processes around a command that count in its group."""
DEATH_SECONDS = 30.0
GROUP_NOTE = "control-group"
"""File in an owned folder that names its control group, for the process that removes what a dead one left."""


class ControlGroup:
    """A group of its own below a group that distributes the controllers.

    Args:
        parent: from `parent_group`.
        memory_bytes: of everything in it; the kernel then kills all of it at once.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path, *, memory_bytes: int) -> None:
        self.path = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self.path.mkdir()
        try:
            self._set("memory.max", memory_bytes)
            self._set("memory.oom.group", 1)
            # A kernel without swap accounting has no such file.
            with contextlib.suppress(FileNotFoundError):
                self._set("memory.swap.max", 0)
        except OSError:
            self.path.rmdir()
            raise

    def allow(self, *, tasks: int, commands: int) -> None:
        """Set how many processes and threads there may be, besides those around `commands` commands."""
        self._set("pids.max", tasks + TASKS_OF_SANDBOX * commands)

    def kills_for_memory(self) -> int:
        """How often the kernel killed because of the memory limit; 0 if the group is gone."""
        try:
            return _read_events(self.path / "memory.events").get("oom_kill", 0)
        except FileNotFoundError:
            return 0

    def kill(self) -> bool:
        """Kill all that is in it. Returns whether nothing is left."""
        return kill_group(self.path)

    def close(self) -> None:
        """Kill what is in it and remove it. Idempotent; never raises."""
        remove_group(self.path)

    def _set(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))


def _read_events(path: Path) -> dict[str, int]:
    return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}


def kill_group(group: Path) -> bool:
    """Kill all processes of a group and wait for their end. Returns whether nothing is left."""
    deadline = time.monotonic() + DEATH_SECONDS
    try:
        while _read_events(group / "cgroup.events").get("populated", 0):
            if time.monotonic() > deadline:
                logger.warning("processes in the control group %s do not end", group)
                return False
            (group / "cgroup.kill").write_text("1")
            time.sleep(0.001)
    except FileNotFoundError:
        # Somebody removed it, or the kernel is older than cgroup.kill and the namespace's end has to do.
        return not group.exists()
    return True


def remove_group(group: Path) -> None:
    """Kill what is in a group and remove it. Never raises."""
    kill_group(group)
    try:
        group.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("cannot remove the control group %s: %s", group, error)


def remove_noted_group(folder: Path) -> None:
    """Remove the control group of a left-over owned folder, if it had one."""
    try:
        group = Path((folder / GROUP_NOTE).read_text())
    except OSError:
        return
    remove_group(group)


@cache
def parent_group() -> Path | None:
    """The group below which sessions get theirs; None if this process may make none with the controllers."""
    found = _own_group()
    if found is None:
        return None
    own, mounted = found
    # A group that holds processes cannot distribute controllers, so ours is rather a sibling of this process's.
    for parent in dict.fromkeys((own.parent if own != mounted else own, own, mounted)):
        if _distributes(parent) and _works(parent):
            return parent
    return None


def _own_group() -> tuple[Path, Path] | None:
    """This process's group and the root of the groups that it sees; None without version 2."""
    within = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None
    )
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if within is not None and after.split()[0] == "cgroup2":
            root, mounted = before.split()[3:5]
            # `root` is the part of the groups that is mounted, often all.
            return Path(mounted) / os.path.relpath(within, root), Path(mounted)
    return None


def _distributes(group: Path) -> bool:
    """Whether children of a group get the controllers; turned on where that is possible."""
    try:
        if set(CONTROLLERS) <= set((group / "cgroup.subtree_control").read_text().split()):
            return True
        if not set(CONTROLLERS) <= set((group / "cgroup.controllers").read_text().split()):
            return False
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    except OSError:
        return False
    return True


def _works(parent: Path) -> bool:
    """Whether a group can be made there, limited and entered."""
    try:
        group = ControlGroup(parent, memory_bytes=1 << 30)
    except OSError:
        return False
    try:
        group.allow(tasks=16, commands=1)
        child = os.posix_spawn(
            "/bin/sh", ["sh", "-c", 'echo 0 >"$1/cgroup.procs"', "sh", str(group.path)], dict(os.environ)
        )
        return os.waitpid(child, 0)[1] == 0 and (group.path / "cgroup.kill").exists()
    except OSError:
        return False
    finally:
        group.close()
