"""The user of a sandbox's commands: no two sandboxes that live at the same time share one."""

import errno
import os
import secrets
import socket
from functools import cache
from pathlib import Path

TRIES = 1000
"""Draws of a user before we say that none is free."""


class UserTakenError(OSError):
    """A living sandbox has this user."""


class CommandUser:
    """A user id of its own until `close` or the death of this process; only root can have one.

    A name in the kernel holds it (an abstract Unix socket), so nothing is left of it when its owner is killed.

    Raises:
        UserTakenError: another sandbox has it.
    """

    def __init__(self, user_id: int) -> None:
        self.user_id = user_id
        self._held = socket.socket(socket.AF_UNIX)
        try:
            self._held.bind(f"\0tree-rl-command-user-{user_id}")
        except OSError as error:
            self._held.close()
            if error.errno == errno.EADDRINUSE:
                raise UserTakenError(f"user {user_id} belongs to another sandbox") from error
            raise

    def close(self) -> None:
        """Let others have it. Idempotent."""
        self._held.close()


def own_user() -> CommandUser | None:
    """A user for a new sandbox's commands; None where only this process's own is possible.

    Raises:
        OSError: no user is free.
    """
    if os.geteuid() != 0:
        return None
    for _ in range(TRIES):
        try:
            return CommandUser(secrets.choice(command_users()))
        except UserTakenError:
            continue
    raise OSError(f"{TRIES} users for commands tried, all taken; does another process hold their names?")


@cache
def command_users() -> range:
    """User ids to draw from, as this process's user namespace knows them."""
    return users_known(Path("/proc/self/uid_map").read_text(encoding="ascii"))


def users_known(uid_map: str) -> range:
    """User ids for commands, so many that draws hardly ever meet.

    Args:
        uid_map: text of a file /proc/PID/uid_map.

    Returns:
        Those beyond a system's own accounts where the namespace knows few.
    """
    mapped = [line.split() for line in uid_map.splitlines()]
    known = max(int(first) + int(count) for first, _, count in mapped)
    return range(1 << 20, 1 << 31) if known >= 1 << 31 else range(20_000, 60_000)
