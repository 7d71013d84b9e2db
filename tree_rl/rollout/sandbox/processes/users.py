"""The user of a sandbox's commands: no two living sandboxes share one."""

import errno
import os
import secrets
import socket
from functools import cache
from pathlib import Path

TRIES = 1000
"""Number of random users that we try before we report that none is free."""


class CommandUser:
    """A reserved user id, until `close` or the death of this process; only root can reserve one.

    An abstract Unix socket reserves it, so the kernel releases it when this process is killed. Raises `OSError`
    (`EADDRINUSE`) if another living sandbox uses it.
    """

    def __init__(self, user_id: int) -> None:
        self.user_id = user_id
        self._held = socket.socket(socket.AF_UNIX)
        try:
            self._held.bind(f"\0tree-rl-command-user-{user_id}")
        except OSError:
            self._held.close()
            raise

    def close(self) -> None:
        self._held.close()


def own_user() -> CommandUser | None:
    """Reserve a user for a sandbox's commands; None unless this process is root. Raises `OSError` if none is free."""
    if os.geteuid() != 0:
        return None
    for _ in range(TRIES):
        try:
            return CommandUser(secrets.choice(command_users()))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"{TRIES} users for commands tried, all taken; does another process hold their names?")


@cache
def command_users() -> range:
    """User ids to choose from in this process's user namespace."""
    return users_known(Path("/proc/self/uid_map").read_text(encoding="ascii"))


def users_known(uid_map: str) -> range:
    """User ids for commands, by the text of a file /proc/PID/uid_map: so many that random choices rarely collide."""
    mapped = [line.split() for line in uid_map.splitlines()]
    known = max(int(first) + int(count) for first, _, count in mapped)
    return range(1 << 20, 1 << 31) if known >= 1 << 31 else range(20_000, 60_000)
