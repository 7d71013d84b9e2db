"""Reads and writes files in an open folder while a hostile process may replace any of them by a link.

Every step opens one name relative to a descriptor and never follows a link; owners and modes change on descriptors.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
NOT_A_FOLDER = (errno.ELOOP, errno.ENOTDIR)


def parts_of(name: str) -> tuple[str, ...]:
    """The parts of a path relative to a sandbox. Raises `ValueError` if it leads outside or names no file."""
    parts: list[str] = []
    is_inside = not name.startswith("/")
    for part in name.split("/"):
        if part == "..":
            is_inside = is_inside and bool(parts)
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    try:
        longest = max((len(part.encode()) for part in parts), default=0)
    except UnicodeEncodeError:
        longest = -1
    if longest < 0 or "\0" in name:
        raise ValueError(f"sandbox path {name!r}: expected text that UTF-8 can hold, without NUL")
    if not is_inside or not parts:
        raise ValueError(f"sandbox path {name!r} leads outside; expected a path relative to the sandbox")
    if longest > 255:
        raise ValueError(f"sandbox path {name[:100]!r}...: expected parts of at most 255 bytes")
    return tuple(parts)


def open_nofollow(name: str, flags: int, folder: int) -> int:
    """Open an entry of a folder; if that is not permitted, first restore its owner's permissions."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        # A path descriptor needs no permission on the entry, and its link in /proc leads to that entry alone.
        path = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            mode = os.fstat(path).st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise
            os.chmod(f"/proc/self/fd/{path}", 0o700)
        finally:
            os.close(path)
        return os.open(name, flags, dir_fd=folder)


@contextmanager
def folder_below(top: int, parts: Sequence[str], *, make_for: int | None = None, make: bool = False) -> Iterator[int]:
    """Open a folder below an open folder.

    Args:
        make: create missing folders, owned by the user `make_for` (None: this process's user).

    Raises:
        ValueError: a part of the path is a link or no folder.
        FileNotFoundError: a folder is missing and `make` is False.
    """
    current = os.dup(top)
    try:
        for part in parts:
            try:
                below = open_nofollow(part, FOLDER_FLAGS, current)
            except FileNotFoundError:
                if not make:
                    raise
                below = _make_folder(part, current, make_for)
            except OSError as error:
                if error.errno in NOT_A_FOLDER:
                    raise ValueError(f"sandbox path {'/'.join(parts)!r} leads through a link or a file") from error
                raise
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def _make_folder(name: str, folder: int, owner: int | None) -> int:
    os.mkdir(name, 0o700, dir_fd=folder)
    made = os.open(name, FOLDER_FLAGS, dir_fd=folder)
    status = os.fstat(made)
    # If a command replaced the new folder by one of its folders, that one keeps its owner.
    if status.st_uid == os.geteuid():
        os.fchmod(made, 0o755)
        hand_over(made, owner)
    return made


def hand_over(descriptor: int, owner: int | None) -> None:
    """Change the owner of an open file; None changes nothing."""
    if owner is not None:
        os.fchown(descriptor, owner, owner)


def write_file(folder: int, name: str, content: bytes, *, owner: int | None) -> None:
    """Write a file of an open folder. An existing file keeps its permissions.

    Raises `ValueError` if the name is taken by a link, a folder or a special file.
    """
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        there = stat.S_IFREG | 0o644
    if not stat.S_ISREG(there):
        raise ValueError(f"sandbox path {name!r} leads through a link, or is no regular file")
    mode = stat.S_IMODE(there) & 0o777 | 0o600
    with new_file(folder, name, mode=mode, owner=owner) as made, open(made, "wb", closefd=False) as stream:
        stream.write(content)


@contextmanager
def new_file(folder: int, name: str, *, mode: int, owner: int | None) -> Iterator[int]:
    """Write a file under a random name, then rename it, so that a file which `name` was linked to is not changed."""
    unknown = f".{secrets.token_hex(16)}"
    made = os.open(unknown, CREATE_FLAGS, 0o600, dir_fd=folder)
    try:
        yield made
        os.fchmod(made, mode)
        hand_over(made, owner)
    finally:
        os.close(made)
    try:
        os.rename(unknown, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise ValueError(f"sandbox path {name!r} was changed while it was written: {error}") from error


def read_file(folder: int, name: str, *, max_bytes: int) -> bytes | None:
    """Read the start of a file; None if there is no such regular file. Raises `ValueError` if it is a link."""
    try:
        opened = open_nofollow(name, READ_FLAGS, folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"sandbox path {name!r} is a link that perhaps leads outside") from error
        return None
    with os.fdopen(opened, "rb") as stream:
        return stream.read(max_bytes) if stat.S_ISREG(os.fstat(opened).st_mode) else None
