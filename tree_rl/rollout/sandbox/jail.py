"""The file system that a workspace's commands see: the system's programs (read-only), their directory, nothing else.

Two ways to the same view: bubblewrap's arguments, or a mount table and a script for util-linux alone.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

PLACE = "/workspace"
"""Where a command finds its directory. The same in every session, so that its output is the same."""
DOOR = "/run/model"
"""Where a command finds the folder `door` beside its workspace, read-only. It holds the socket to the model."""
LOOPBACK = "loopback.py"
"""Program in that folder that makes 127.0.0.1 work; bubblewrap does that itself."""
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
SETTINGS = ("alternatives", "ld.so.cache", "nsswitch.conf", "localtime")
ACCOUNTS = "accounts"
"""Folder beside the workspace with the files `passwd` and `group` that commands see: none of the machine's accounts."""
USER = "agent"
"""Name of the commands' user. `whoami`, git and Node fail for a user without a name."""
NETWORK_SETTINGS = ("resolv.conf", "hosts", "ssl", "ca-certificates", "pki")
DEVICES = ("null", "zero", "full", "random", "urandom")
SCRATCH = ("/tmp", "/dev/shm")
"""The only places besides the workspace that a command can write to. They are in memory, and new for every command."""
SCRATCH_BYTES = 64 << 20
"""Size of each."""
SCRATCH_ENTRIES = 16_384
"""Files and folders in each; bubblewrap cannot limit them, so a session's look at its memory counts them."""

SETTINGS_OF_IPC = (f"kernel/shmall={SCRATCH_BYTES // os.sysconf('SC_PAGE_SIZE')}", "kernel/msgmni=64")
"""System V memory outlives its processes, so no look finds it. These count in the new namespace only."""
SETTINGS_OF_USERS = ("user/max_user_namespaces=0",)
"""Settings of a user namespace, in which a process could mount memory without end. Counts in ours only where we are in
one."""

ENTER = """\
#!/bin/sh
# Runs as the first process of new namespaces: builds the view, goes into it, becomes the command.
set -e
asked=$PATH PATH=/usr/sbin:/usr/bin:/sbin:/bin
parent=${{0%/*}}
mount -n -a -T "$parent/mounts"
cd "$parent/root"
{read_only}
for setting in {settings}; do
  echo "${{setting#*=}}" 2>/dev/null >"/proc/sys/${{setting%%=*}}" || :
done
pivot_root . .
umount -n -l .
[ ! -e {door}/{loopback} ] || python3 -I -S {door}/{loopback}
cd {place}
PATH=$asked
exec "$@"
"""


def jail_argv(directory: Path, *, network: bool, readable: Sequence[Path] = (), info: int | None = None) -> list[str]:
    """bubblewrap's arguments.

    Args:
        directory: shown at `PLACE`, writable.
        network: keep the machine's network.
        readable: further paths, shown where they are, read-only.
        info: descriptor where bubblewrap tells which process is the first of its namespace.
    """
    argv = ["--unshare-all", "--die-with-parent", *(["--share-net"] if network else [])]
    if info is not None:
        argv += ["--info-fd", str(info)]
    argv += ["--size", str(SCRATCH_BYTES), "--tmpfs", "/"]
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    # What holds devices is in memory too and has no size, so nobody may write to it.
    argv += ["--dev", "/dev", "--remount-ro", "/dev", "--proc", "/proc"]
    for place in SCRATCH:
        argv += ["--size", str(SCRATCH_BYTES), "--tmpfs", place]
    for shown in (*_settings(network), *readable):
        argv += ["--ro-bind", str(shown), str(shown)]
    for name in ("passwd", "group"):
        argv += ["--ro-bind", str(directory.parent / ACCOUNTS / name), f"/etc/{name}"]
    argv += ["--ro-bind", str(directory.parent / "door"), DOOR]
    return [*argv, "--bind", str(directory), PLACE, "--remount-ro", "/", "--chdir", PLACE, "--"]


def write_accounts(parent: Path, *, user_id: int, group_id: int) -> None:
    """Write `passwd` and `group` with the commands' user, as its namespace sees it, and the two that every system has.

    Args:
        parent: of the workspace; not writable by its commands.
    """
    folder = parent / ACCOUNTS
    folder.mkdir(mode=0o755)
    # The first line of an id counts: the user may be one of the two.
    people = [(USER, user_id, group_id, PLACE), ("root", 0, 0, "/root"), ("nobody", 65534, 65534, "/nonexistent")]
    passwd = "".join(f"{name}:x:{user}:{group}::{home}:/bin/sh\n" for name, user, group, home in people)
    groups = "".join(f"{name}:x:{group}:\n" for name, _, group, _ in people)
    for file, text in (("passwd", passwd), ("group", groups)):
        (folder / file).write_text(text, encoding="ascii")
        (folder / file).chmod(0o644)


def lay_out_jail(parent: Path, directory: Path, *, network: bool, readable: Sequence[Path]) -> None:
    """Write what the means `mounts` needs: mount points below `parent/root`, `parent/mounts` and `parent/enter`.

    Args:
        parent: of the workspace; not writable by its commands.
        directory: shown at `PLACE`, writable.
        network: show the settings of the machine's network.
        readable: further paths, shown where they are, read-only.
    """
    root = parent / "root"
    root.mkdir(mode=0o755)
    (parent / "door").mkdir(mode=0o755, exist_ok=True)
    table = [f"{root} {root} none bind"]
    shown = list(_settings(network))
    for name in SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(path.readlink())
        elif path.is_dir():
            shown.insert(0, path)
    for path in shown:
        _mount_point(root, path, is_folder=path.is_dir())
        table.append(f"{_escape(path)} {_escape(root)}{_escape(path)} none bind,ro,nosuid")
    for name in ("passwd", "group"):
        _mount_point(root, Path("/etc", name), is_folder=False)
        table.append(f"{parent}/{ACCOUNTS}/{name} {root}/etc/{name} none bind,ro,nosuid,nodev")
    for device in DEVICES:
        _mount_point(root, Path("/dev", device), is_folder=False)
        table.append(f"/dev/{device} {root}/dev/{device} none bind")
    scratch = f"nosuid,nodev,mode=1777,size={SCRATCH_BYTES},nr_inodes={SCRATCH_ENTRIES}"
    for folder, kind, options in (
        ("/proc", "proc", "nosuid,nodev,noexec"),
        *((place, "tmpfs", scratch) for place in SCRATCH),
    ):
        _mount_point(root, Path(folder), is_folder=True)
        table.append(f"{kind} {root}{folder} {kind} {options}")
    table += [f"{_escape(path)} {_escape(root)}{_escape(path)} none bind,ro,nosuid,X-mount.mkdir" for path in readable]
    _mount_point(root, Path(DOOR), is_folder=True)
    table.append(f"{parent}/door {root}{DOOR} none bind,ro,nosuid,nodev")
    _mount_point(root, Path(PLACE), is_folder=True)
    table.append(f"{directory} {root}{PLACE} none bind,nosuid,nodev")
    (parent / "mounts").write_text("".join(f"{line} 0 0\n" for line in table))
    enter = parent / "enter"
    # A command that runs as a user of its own cannot write there anyway.
    is_root = os.geteuid() == 0
    read_only = ":" if is_root else "mount -n -o remount,bind,ro ."
    settings = " ".join((*SETTINGS_OF_IPC, *(() if is_root else SETTINGS_OF_USERS)))
    text = ENTER.format(place=PLACE, read_only=read_only, settings=settings, door=DOOR, loopback=LOOPBACK)
    enter.write_text(text)
    enter.chmod(0o755)


def _settings(network: bool) -> Iterable[Path]:
    names = SETTINGS + (NETWORK_SETTINGS if network else ())
    return [Path("/etc", name) for name in names if Path("/etc", name).exists()]


def _mount_point(root: Path, path: Path, *, is_folder: bool) -> None:
    point = root / path.relative_to("/")
    point.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        point.mkdir(exist_ok=True)
    else:
        point.touch()


def _escape(path: Path) -> str:
    return str(path).replace(" ", "\\040")
