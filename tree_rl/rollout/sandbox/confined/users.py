"""The user of a workspace's commands: no two workspaces that live at the same time share one."""

import errno
import os
import secrets
import socket

from tree_rl.rollout.sandbox.confinement import command_users

TRIES = 1000
"""Draws of a user before we say that none is free."""


class CommandUser:
    """A user id of its own until `close` or the death of this process; only root can have one.

    A name in the kernel holds it (an abstract Unix socket), so nothing is left of it when its owner is killed.

    Raises:
        OSError: no user is free.
    """

    def __init__(self) -> None:
        self._held = socket.socket(socket.AF_UNIX)
        for _ in range(TRIES):
            self.user_id = secrets.choice(command_users())
            try:
                self._held.bind(f"\0tree-rl-command-user-{self.user_id}")
                return
            except OSError as error:
                # Another workspace has it.
                if error.errno != errno.EADDRINUSE:
                    raise
        self._held.close()
        raise OSError(f"{TRIES} users for commands tried, all taken; does another process hold their names?")

    def close(self) -> None:
        """Let others have it. Idempotent."""
        self._held.close()


def own_user() -> CommandUser | None:
    """A user for a new workspace's commands; None where only this process's own is possible."""
    return CommandUser() if os.geteuid() == 0 else None
