"""Limits of a sandbox's commands."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one command may use. Raises `ValueError` if a limit is not positive."""

    timeout_seconds: float = 30.0
    """Wall-clock time until a command and everything it started are killed."""
    cpu_seconds: int | None = None
    """CPU time of each process; `null`: `timeout_seconds`."""
    output_bytes: int = 65_536
    """Output kept (standard output and error together); judges keep 8 MiB."""
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
            value = getattr(self, name)
            if name != "network" and value is not None and value <= 0:
                raise ValueError(f"Limits.{name}={value}: expected a positive value")

    @property
    def cpu_limit_seconds(self) -> int:
        """CPU time of each process, also where it is not given."""
        return math.ceil(self.timeout_seconds) if self.cpu_seconds is None else self.cpu_seconds
