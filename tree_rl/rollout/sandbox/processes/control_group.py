"""A control group (cgroup v2) for all commands of a session: limits memory and processes, and kills all at once.

Needs a parent group with the controllers `memory` and `pids` in which this process may create groups: as root, or in a
delegated systemd unit. Without one, `usage` polls instead.
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
"""Most processes that the sandbox adds to a command; they count in its group."""
DEATH_SECONDS = 30.0
GROUP_NOTE = "control-group"
"""File in an owned folder that names its control group, so that another process can clean up after a crash."""


class ControlGroup:
    """A new group below `parent_group()`.

    Args:
        memory_bytes: limit of all processes together; beyond it the kernel kills all of them at once.

    Raises:
        OSError: the group cannot be created.
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
        """Limit processes and threads to `tasks`, plus those that the sandbox adds to `commands` commands."""
        self._set("pids.max", tasks + TASKS_OF_SANDBOX * commands)

    def kills_for_memory(self) -> int:
        """Number of kills by the kernel because of the memory limit; 0 if the group is gone."""
        try:
            return _read_events(self.path / "memory.events").get("oom_kill", 0)
        except FileNotFoundError:
            return 0

    def kill(self) -> bool:
        return kill_group(self.path)

    def close(self) -> None:
        """Kill all processes of the group and remove it. Idempotent; never raises."""
        remove_group(self.path)

    def _set(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))


def _read_events(path: Path) -> dict[str, int]:
    return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}


def kill_group(group: Path) -> bool:
    """Kill all processes of a group and wait for their end. Returns True if none is left."""
    deadline = time.monotonic() + DEATH_SECONDS
    try:
        while _read_events(group / "cgroup.events").get("populated", 0):
            if time.monotonic() > deadline:
                logger.warning("processes in the control group %s do not end", group)
                return False
            (group / "cgroup.kill").write_text("1")
            time.sleep(0.001)
    except FileNotFoundError:
        # Another process removed it, or the kernel has no cgroup.kill; then ending the namespace must suffice.
        return not group.exists()
    return True


def remove_group(group: Path) -> None:
    """Kill all processes of a group and remove it. Never raises."""
    kill_group(group)
    try:
        group.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("cannot remove the control group %s: %s", group, error)


def remove_noted_group(folder: Path) -> None:
    """Remove the control group of a folder whose process died, if it had one."""
    try:
        group = Path((folder / GROUP_NOTE).read_text())
    except OSError:
        return
    remove_group(group)


@cache
def parent_group() -> Path | None:
    """The parent of all sessions' groups; None if this process cannot create groups with the controllers."""
    found = _own_group()
    if found is None:
        return None
    own, mounted = found
    # A group that holds processes cannot distribute controllers, so a sibling of this process's group comes first.
    for parent in dict.fromkeys((own.parent if own != mounted else own, own, mounted)):
        if _distributes(parent) and _works(parent):
            return parent
    return None


def _own_group() -> tuple[Path, Path] | None:
    """This process's group and the root of the mounted groups; None without cgroup v2."""
    within = next(
        (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None
    )
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if within is not None and after.split()[0] == "cgroup2":
            root, mounted = before.split()[3:5]
            # `root` is the mounted part of the hierarchy, often all of it.
            return Path(mounted) / os.path.relpath(within, root), Path(mounted)
    return None


def _distributes(group: Path) -> bool:
    """Give a group's children the controllers if possible; return True if they have them."""
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
    """Try to create, limit and enter a group there; return True on success."""
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
