"""Wraps a command in bubblewrap and the kernel's limits.

A command sees only the system's programs and the sandbox's folder. It shares the kernel: agents that attack the kernel
need virtual machines.
"""

import os
import platform
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

from tree_rl.rollout.sandbox.processes.limits import Limits

PLACE = "/workspace"
"""Path at which a command sees the sandbox's folder. The same in every session, so that outputs do not differ."""
MODEL = "model"
"""Name of the folder, next to the sandbox's, with the socket to the model."""
MODEL_PLACE = "/run/model"
"""Path at which a command sees that folder, read-only."""
ACCOUNTS = "accounts"
"""Name of the folder, next to the sandbox's, with the `passwd` and `group` that commands see instead of ours."""
SYSCALL_FILTER = "calls"
"""Name of the file, next to the sandbox's folder, with the seccomp filter."""
USER = "agent"
"""Name of the commands' user. `whoami`, git and Node fail for a user without a name."""
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
"""PATH of every command."""
SYSTEM_PATH = f"{SEARCH_PATH}:/usr/local/sbin:/usr/sbin:/sbin"
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
SETTINGS = ("alternatives", "ld.so.cache", "nsswitch.conf", "localtime")
NETWORK_SETTINGS = ("resolv.conf", "hosts", "ssl", "ca-certificates", "pki")
SCRATCH = ("/tmp", "/dev/shm")
"""The only other folders that a command can write to. They are in memory and new for every command."""
SCRATCH_BYTES = 64 << 20
"""Size of each folder of `SCRATCH`."""

BEGIN = 'echo 1000 >/proc/self/oom_score_adj && exec "$@"'
"""Shell script that starts a command: the kernel kills it first when memory is short."""
REFUSED_CALLS = {"x86_64": (0xC000003E, (29, 64, 68)), "aarch64": (0xC00000B7, (194, 190, 186))}
"""seccomp's number of each architecture, and its numbers of shmget, semget and msgget. System V memory outlives the
processes that made it, so our checks would not find it."""


def sandbox_argv(
    command: Sequence[str],
    info: int,
    *,
    directory: Path,
    user_id: int | None,
    limits: Limits,
    unconfined: bool,
    readable: Sequence[Path],
    calls: int,
) -> list[str]:
    """Put bubblewrap and the limits in front of a command, and return the argv to execute.

    Programs become absolute paths, because the trainer's PATH finds them and the command's may not.

    Args:
        info: descriptor to which bubblewrap writes the id of its namespace's first process.
        directory: mounted at `PLACE`, writable. Its parent holds the files of `write_accounts_and_filter`.
        user_id: the user it runs as; None keeps this process's user (only root may change it).
        unconfined: leaves bubblewrap out; the limits stay.
        readable: further paths, mounted read-only where they are.
        calls: descriptor of the seccomp filter.
    """
    argv = ["/bin/sh", "-c", BEGIN, "sh"]
    if user_id is not None or unconfined:
        # Root is exempt from the process limit, so a command never runs as root. bubblewrap needs no root.
        user = [] if user_id is None else ["--clear-groups", f"--reuid={user_id}", f"--regid={user_id}"]
        argv += [_program("setpriv"), "--pdeathsig=KILL", "--no-new-privs", *user, "--"]
    if not unconfined:
        argv += [_program("bwrap"), "--info-fd", str(info), "--seccomp", str(calls)]
        argv += _view(directory, network=limits.network, readable=readable)
    return [
        *argv,
        # bubblewrap shows the system's programs alone, so an absolute path of another folder would fail.
        _program("prlimit") if unconfined else "prlimit",
        f"--cpu={limits.cpu_limit_seconds}",
        f"--fsize={limits.file_bytes}",
        f"--as={limits.memory_bytes}",
        # Outside a namespace the limit counts all processes of the user, and the trainer has many.
        *([f"--nproc={limits.processes}"] if user_id is not None or not unconfined else []),
        "--nofile=256",
        "--core=0",
        "--",
        *command,
    ]


def _view(directory: Path, *, network: bool, readable: Sequence[Path]) -> list[str]:
    """bubblewrap's arguments for namespaces and mounts."""
    argv = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    argv += [*(["--share-net"] if network else []), "--size", str(SCRATCH_BYTES), "--tmpfs", "/"]
    for path in (Path("/", name) for name in SYSTEM):
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    # /dev is in memory and has no size limit, so it is read-only.
    argv += ["--dev", "/dev", "--remount-ro", "/dev", "--proc", "/proc"]
    for place in SCRATCH:
        argv += ["--size", str(SCRATCH_BYTES), "--tmpfs", place]
    settings = (Path("/etc", name) for name in (*SETTINGS, *(NETWORK_SETTINGS if network else ())))
    for shown in (*(path for path in settings if path.exists()), *readable):
        argv += ["--ro-bind", str(shown), str(shown)]
    for name in ("passwd", "group"):
        argv += ["--ro-bind", str(directory.parent / ACCOUNTS / name), f"/etc/{name}"]
    argv += ["--ro-bind", str(directory.parent / MODEL), MODEL_PLACE]
    return [*argv, "--bind", str(directory), PLACE, "--remount-ro", "/", "--chdir", PLACE, "--"]


def write_accounts_and_filter(parent: Path, *, user_id: int, group_id: int) -> None:
    """Write the commands' accounts and seccomp filter into the sandbox's parent, which they cannot write to."""
    folder = parent / ACCOUNTS
    folder.mkdir(mode=0o755)
    # The first line of an id wins: the user may be root or nobody.
    people = [(USER, user_id, group_id, PLACE), ("root", 0, 0, "/root"), ("nobody", 65534, 65534, "/nonexistent")]
    passwd = "".join(f"{name}:x:{user}:{group}::{home}:/bin/sh\n" for name, user, group, home in people)
    groups = "".join(f"{name}:x:{group}:\n" for name, _, group, _ in people)
    for file, text in (("passwd", passwd), ("group", groups)):
        (folder / file).write_text(text, encoding="ascii")
        (folder / file).chmod(0o644)
    (parent / SYSCALL_FILTER).write_bytes(_filter())


def _filter() -> bytes:
    """A seccomp program that refuses `REFUSED_CALLS` and all calls of 32-bit programs with ENOSYS.

    On an architecture that is not listed it refuses all calls, so bubblewrap does not start.
    """
    machine, refused = REFUSED_CALLS.get(platform.machine(), (0, ()))
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, does_not_exist = 0x7FFF0000, 0x00050000 | 38
    x32 = 0x40000000
    tests = [(at_least, x32), *((equal, number) for number in refused)]
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, does_not_exist), (load, 0, 0, 0)]
    # A test that holds jumps to the last step, which refuses.
    steps += [(code, len(tests) - number, 0, value) for number, (code, value) in enumerate(tests)]
    steps += [(answer, 0, 0, allow), (answer, 0, 0, does_not_exist)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _program(name: str) -> str:
    """A program's absolute path; its name if there is none."""
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), SYSTEM_PATH)))
    return os.path.abspath(found) if found else name
