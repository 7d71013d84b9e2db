"""Writes a file completely or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.open_file import kind_of_file, reason
from tree_rl.inspection.files.quoting import quoted_path

REMEDY = "name another place, or make room and give write permission"


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically; on any failure the old file stays and nothing new is left.

    Missing folders are created, links are followed, and devices and pipes are written to.

    Raises:
        InputError: the path is a folder or not writable, or the disk is full.
    """
    try:
        with _folder_made(path.parent):
            mode = _mode_of_writable(path)
            if mode is None or stat.S_ISREG(mode):
                _replace(Path(os.path.realpath(path)), content, mode)
            elif stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
                _write_all(_open_stream(path), content)
            else:
                received = f"received {kind_of_file(mode)}; {REMEDY}"
                raise InputError(f"{quoted_path(path)}: expected a file to write, {received}")
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"{quoted_path(path)}: expected a file that can be written: {reason(error)}; {REMEDY}"
        ) from error


def require_folder_of(path: Path, option: str) -> None:
    """Raise an InputError that names the option if the folder of an output does not exist: the path may have a typo."""
    if not os.path.isdir(path.parent):
        raise InputError(
            f"{option} {quoted_path(path)}: expected a path in a folder that exists, found no folder "
            f"{quoted_path(path.parent)}; correct the path, or create the folder"
        )


def require_writable_folder(path: Path, option: str) -> None:
    """Try to write into a folder, and leave it unchanged, so that a long run does not fail at its end.

    Raises an InputError that names the option if that fails, or if neither it nor the folder above it exists.
    """
    require_folder_of(path, option)
    try:
        with _folder_made(path) as made:
            probe = _new_name(path)
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            probe.unlink()
            _remove(made)
    except OSError as error:
        raise InputError(
            f"{option} {quoted_path(path)}: expected a folder that can be written: {reason(error)}; {REMEDY}"
        ) from error


@contextmanager
def _folder_made(path: Path) -> Iterator[list[Path]]:
    """Create a folder and its parents; yields the new ones, deepest first, and removes them on failure."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield made
    except BaseException:
        _remove(made)
        raise


def _remove(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _mode_of_writable(target: Path) -> int | None:
    """Mode of the target, None if it does not exist. Opens it, because a rename would replace even a read-only file."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        os.close(os.open(target, os.O_WRONLY | os.O_CLOEXEC))
    return mode


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    new = _new_name(target.parent)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if mode is not None:
            os.fchmod(descriptor, stat.S_IMODE(mode))
        _write_all(descriptor, content)
        os.replace(new, target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _new_name(folder: Path) -> Path:
    """A temporary name, short even if the target's name is long."""
    return folder / f".tree_rl-{secrets.token_hex(8)}.new"


def _open_stream(target: Path) -> int:
    # Non-blocking: opening a pipe without a reader fails at once.
    descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return descriptor


def _write_all(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
