"""Temporary folders that disappear even if their process is killed: the next process that needs one removes them.

A process locks its folder, and the kernel releases the lock when the process dies. In a folder without a lock we kill
what still runs, then delete it.
"""

import fcntl
import logging
import os
import tempfile
import time
from pathlib import Path

from tree_rl.rollout.sandbox.files.trees import remove_tree
from tree_rl.rollout.sandbox.processes.processes import kill_processes_in

logger = logging.getLogger(__name__)

PREFIX = "tree-rl-owned-"
"""We delete every folder with this prefix that nobody locks; no user gives a folder such a name."""
MAKING = "making-"
"""Second part of the name until the folder is locked. After `MAKING_SECONDS` its process counts as dead."""
MAKING_SECONDS = 60.0


class OwnedFolder:
    """A folder in the system's temporary folder, until `close` or the death of this process."""

    def __init__(self, kind: str) -> None:
        made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{MAKING}{kind}-"))
        self._lock: int | None = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Others leave a folder with the first name alone for a minute, so none removes it before it is locked.
        self.path = made.rename(made.with_name(made.name.replace(MAKING, "", 1)))

    def close(self) -> None:
        """Delete the folder and its contents. Idempotent; logs what cannot be deleted instead of raising."""
        remove_tree(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_left_over_folders() -> list[Path]:
    """Delete the folders of this user's dead processes, kill what still runs in them, and return what was deleted."""
    removed = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            # Not a folder, another user's, or deleted meanwhile.
            continue
        try:
            if _is_left_over(folder, lock):
                kill_processes_in(folder)
                if remove_tree(folder):
                    removed.append(folder)
        finally:
            os.close(lock)
    if removed:
        logger.info("removed %d temporary folders of dead processes, such as %s", len(removed), removed[0])
    return removed


def _is_left_over(folder: Path, lock: int) -> bool:
    status = os.fstat(lock)
    if status.st_uid != os.geteuid():
        return False
    if folder.name.startswith(PREFIX + MAKING) and time.time() - status.st_mtime < MAKING_SECONDS:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Its process lives, or the file system has no locks.
        return False
    return True
