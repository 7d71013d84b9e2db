"""How a command is confined: the argv that goes in front of it, from the strictest means that works on this machine.

This keeps a policy's mistakes inside its directory; without bubblewrap it can still write where everybody can (`/tmp`).
It is no boundary against a determined attacker: run untrusted agents in containers of their own.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Means = Literal["bubblewrap", "namespaces", "limits"]
STRICTEST_FIRST: tuple[Means, ...] = ("bubblewrap", "namespaces", "limits")
PROGRAMS: Mapping[Means, tuple[str, ...]] = {
    "bubblewrap": ("bwrap", "prlimit", "setpriv"),
    "namespaces": ("unshare", "prlimit", "setpriv"),
    "limits": ("prlimit", "setpriv"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one command may use.

    Raises:
        ValueError: a limit is not positive.
    """

    timeout_seconds: float = 10.0
    """Wall-clock time until everything it started is killed."""
    cpu_seconds: int = 5
    """CPU time of each process."""
    output_bytes: int = 16_384
    """Output kept (standard output and error together)."""
    file_bytes: int = 16 << 20
    """Size of any file it writes."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    processes: int = 32
    """Processes and threads at a time; not enforced by `limits` without root, where only the time-out ends a fork
    bomb."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"Limits.{name}={getattr(self, name)}: expected a positive value")


def confined_argv(
    command: Sequence[str], *, directory: Path, user_id: int | None, limits: Limits, means: Means
) -> list[str]:
    """Put the confinement in front of a command.

    Args:
        command: program and arguments.
        directory: the only place it should write.
        user_id: the user it runs as; None keeps this process's user (only root may change it).
        limits: resource limits.
        means: `bubblewrap`: read-only file system outside `directory`, own process and network namespace;
            `namespaces`: own process and network namespace; `limits`: resource limits only.

    Returns:
        argv to execute.
    """
    as_user: list[str] = []
    if user_id is not None:
        # Root is exempt from the process limit, so a command never runs as root.
        as_user = ["setpriv", f"--reuid={user_id}", f"--regid={user_id}", "--clear-groups", "--no-new-privs", "--"]
    argv: list[str] = []
    if means == "bubblewrap":
        # bubblewrap needs no root, and its namespace would not know another user later.
        argv += [*as_user, "bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev"]
        argv += ["--proc", "/proc", "--tmpfs", "/tmp", "--bind", str(directory), str(directory)]
        argv += ["--chdir", str(directory), "--"]
    elif means == "namespaces":
        argv += ["unshare", "--pid", "--fork", "--kill-child=KILL", "--net", "--ipc"]
        argv += [] if user_id is not None else ["--user", "--map-current-user"]
        argv += ["--"]
    argv += [
        "prlimit",
        f"--cpu={limits.cpu_seconds}",
        f"--fsize={limits.file_bytes}",
        f"--as={limits.memory_bytes}",
        # Outside a namespace the limit counts all processes of the user, and the trainer has many.
        *([f"--nproc={limits.processes}"] if user_id is not None or means != "limits" else []),
        "--nofile=256",
        "--core=0",
        "--",
    ]
    if means != "bubblewrap":
        argv += as_user
    return [*argv, *command]


@cache
def strictest_means() -> Means:
    """Find out, once, which means work here.

    Raises:
        RuntimeError: not even resource limits can be set.
    """
    user_id = 65534 if os.geteuid() == 0 else None
    for means in STRICTEST_FIRST:
        # The probe forks, as a process limit that counts the trainer's own processes would fail only then.
        probe = ["/bin/sh", "-c", "(:) & wait"]
        argv = confined_argv(probe, directory=Path("/"), user_id=user_id, limits=Limits(), means=means)
        if any(shutil.which(program) is None for program in PROGRAMS[means]):
            continue
        if subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20).returncode == 0:
            return means
    raise RuntimeError("no way to limit commands: expected the programs prlimit and setpriv (Debian: util-linux)")
