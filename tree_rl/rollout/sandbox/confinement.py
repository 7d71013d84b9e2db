"""Confines a command: the arguments in front of it, from the strictest means that works on this machine.

With `bubblewrap` or `mounts` a command sees the system's programs and its own directory, nothing else. With the weaker
means it reads what its user may read. It always shares the kernel: agents that attack the kernel need virtual machines.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tree_rl.rollout.sandbox.jail import jail_argv, lay_out_jail, write_accounts
from tree_rl.rollout.sandbox.ownership import OwnedFolder

Means = Literal["bubblewrap", "mounts", "namespaces", "limits"]
STRICTEST_FIRST: tuple[Means, ...] = ("bubblewrap", "mounts", "namespaces", "limits")
HIDING: tuple[Means, ...] = ("bubblewrap", "mounts")
"""Means under which the trainer's files, processes and environment cannot be seen."""
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where commands find programs."""
SYSTEM_PATH = f"{SEARCH_PATH}:/usr/local/sbin:/usr/sbin:/sbin"

DIE_WITH_PARENT = ("setpriv", "--pdeathsig=KILL")
"""Kills the commands of a killed trainer; bubblewrap does that itself."""
BEGIN = 'echo 1000 >/proc/self/oom_score_adj && { [ -z "$0" ] || echo 0 >"$0/cgroup.procs"; } && exec "$@"'
"""What the first process of a command does: the kernel's first choice when memory is short, in its control group."""


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
    disk_bytes: int = 256 << 20
    """Size of the whole directory; a file, folder or link counts at least 4 KiB, and a tree deeper than 128 folders is
    too large. We look a few times a second and kill a command beyond it."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and memory that all processes of a workspace occupy together, with what they keep
    in /tmp and /dev/shm. A command beyond it is killed."""
    processes: int = 32
    """Processes and threads at a time, of all commands of a workspace together; without root, `limits` finds only those
    that did not leave their parents."""
    network: bool = False
    """True if it reaches the machine's network. The means `limits` cannot prevent it."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "network" and getattr(self, name) <= 0:
                raise ValueError(f"Limits.{name}={getattr(self, name)}: expected a positive value")


def confined_argv(
    command: Sequence[str],
    *,
    directory: Path,
    user_id: int | None,
    limits: Limits,
    means: Means,
    readable: Sequence[Path] = (),
    info: int | None = None,
    group: Path | None = None,
) -> list[str]:
    """Put the confinement in front of a command.

    Args:
        directory: the only place it should write; `bubblewrap` and `mounts` show it at `jail.PLACE`. For `mounts` its
            parent holds what `jail.lay_out_jail` made.
        user_id: the user it runs as; None keeps this process's user (only root may change it).
        means: `bubblewrap`, `mounts`: own file system of system programs (read-only) and `directory`, own processes
            and network; `namespaces`: own processes and network; `limits`: resource limits only.
        readable: further paths that it sees, read-only; for `mounts`, `jail.lay_out_jail` was told.
        info: descriptor where bubblewrap tells the first process of its namespace.
        group: control group that it joins.

    Returns:
        argv to execute, programs of the machine as absolute paths: the trainer's PATH finds them, not the command's.
    """
    as_user: list[str] = []
    if user_id is not None:
        # Root is exempt from the process limit, so a command never runs as root.
        # A change of user clears the signal at the parent's death, so we ask for it again.
        new_user = ["--clear-groups", "--no-new-privs", f"--reuid={user_id}", f"--regid={user_id}"]
        as_user = [*DIE_WITH_PARENT, *new_user, "--"]
    elif means == "mounts":
        # It is root only in its own namespace, and needs no capabilities there any more.
        as_user = [*DIE_WITH_PARENT, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
    argv = ["/bin/sh", "-c", BEGIN, "" if group is None else str(group)]
    if means == "bubblewrap":
        # bubblewrap needs no root, and its namespace would not know another user later.
        argv += _found(as_user)
        argv += _found(["bwrap", *_closing()])
        argv += jail_argv(directory, network=limits.network, readable=readable, info=info)
    else:
        argv += _found([*DIE_WITH_PARENT, "--"])
    if means in ("mounts", "namespaces"):
        own = ["--pid", "--fork", "--kill-child=KILL", "--ipc", *([] if limits.network else ["--net"])]
        argv += _found(["unshare", *own])
        if user_id is None:
            argv += ["--user", "--map-root-user" if means == "mounts" else "--map-current-user"]
        argv += ["--mount", "--", str(directory.parent / "enter")] if means == "mounts" else ["--"]
    limited = [
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
    # A view of its own shows the system's programs only.
    find = list if means in HIDING else _found
    argv += find(limited)
    if means != "bubblewrap":
        argv += find(as_user)
    return [*argv, *command]


def _found(argv: Sequence[str]) -> list[str]:
    """A command with its program as an absolute path; unchanged if there is none."""
    return [_program(argv[0], os.environ.get("PATH", "")), *argv[1:]] if argv else []


@cache
def _program(name: str, path: str) -> str:
    found = shutil.which(name, path=os.pathsep.join((path, SYSTEM_PATH)))
    return os.path.abspath(found) if found else name


def strictest_means() -> Means:
    """The strictest means that works here. Raises `RuntimeError` if none does."""
    return working_means()[0]


@cache
def working_means() -> tuple[Means, ...]:
    """All means that work here, the strictest first. Raises `RuntimeError` if none does."""
    user_id = 65534 if os.geteuid() == 0 else None
    working: list[Means] = []
    with closing(OwnedFolder("probe")) as owned:
        directory = owned.path / "files"
        directory.mkdir()
        owned.path.chmod(0o711)
        directory.chmod(0o777)
        write_accounts(owned.path, user_id=65534, group_id=65534)
        lay_out_jail(owned.path, directory, network=False, readable=())
        for means in STRICTEST_FIRST:
            # The probe forks, as a process limit that counts the trainer's own processes would fail only then.
            probe = ["/bin/sh", "-c", "(:) & wait"]
            argv = confined_argv(probe, directory=directory, user_id=user_id, limits=Limits(), means=means)
            if _works(argv):
                working.append(means)
    if not working:
        raise RuntimeError("no way to limit commands: expected the programs prlimit and setpriv (Debian: util-linux)")
    return tuple(working)


def forbids_user_namespaces(means: Means) -> bool:
    """Whether commands surely cannot make user namespaces."""
    return means == "bubblewrap" and bool(_closing())


@cache
def _closing() -> tuple[str, ...]:
    """bubblewrap's arguments against further user namespaces, where it has them and they work."""
    closing = ("--unshare-user", "--disable-userns")
    as_user = ["setpriv", "--clear-groups", "--reuid=65534", "--regid=65534", "--"] if os.geteuid() == 0 else []
    view = ["--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--", "/bin/sh", "-c", ":"]
    return closing if _works([*_found(as_user), *_found(["bwrap", *closing]), *view]) else ()


def _works(argv: Sequence[str]) -> bool:
    """Whether a command ends well with the environment that commands get."""
    environment = {"PATH": SEARCH_PATH, "HOME": "/"}
    try:
        finished = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=20, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return finished.returncode == 0
