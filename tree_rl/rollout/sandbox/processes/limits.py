"""Limits of a sandbox's commands."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one command may use.

    Raises:
        ValueError: a limit is not positive.
    """

    timeout_seconds: float = 30.0
    """Wall-clock time until a command and everything it started are killed."""
    cpu_seconds: int = 30
    """CPU time of each process."""
    output_bytes: int = 65_536
    """Output kept (standard output and error together); of commands that judge a session at least 8 MiB."""
    file_bytes: int = 16 << 20
    """Size of any file that a command writes."""
    disk_bytes: int = 256 << 20
    """Size of the sandbox's folder; a file, folder or link counts at least 4 KiB, and a tree deeper than 128 folders is
    too large. We check a few times a second and kill a command that exceeds it."""
    memory_bytes: int = 2 << 30
    """Address space of each process, and memory of all processes of a sandbox together, including their files in /tmp
    and /dev/shm. A command that exceeds it is killed."""
    processes: int = 64
    """Processes and threads at a time, of all commands of a sandbox together."""
    network: bool = False
    """True if commands reach the machine's network."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "network" and getattr(self, name) <= 0:
                raise ValueError(f"Limits.{name}={getattr(self, name)}: expected a positive value")
