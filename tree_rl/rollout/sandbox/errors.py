"""How a sandbox fails."""


class SandboxError(RuntimeError):
    """A sandbox cannot start; the message names the config key to change."""


class SandboxDied(RuntimeError):  # noqa: N818
    """A sandbox stopped answering. The session ends; the agent is not at fault."""
