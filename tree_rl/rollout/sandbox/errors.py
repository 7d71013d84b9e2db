"""Errors of a sandbox."""


class SandboxError(RuntimeError):
    """A sandbox cannot start; the message names the config key to change."""


class SandboxDied(RuntimeError):  # noqa: N818
    """A sandbox that had started stopped answering. The session ends with reward 0: its commands may have killed it."""
