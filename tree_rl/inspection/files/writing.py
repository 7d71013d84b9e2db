"""Writes a file of a user whole or not at all."""

import os
import secrets
import stat
from pathlib import Path

from tree_rl.inspection.files.errors import InputError
from tree_rl.inspection.files.reading import kind_of_file, reason
from tree_rl.inspection.files.shown import shown_path

REMEDY = "name another place, or make room and give write permission"


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in place at once; whatever fails, the old file stays and nothing new is left.

    Folders on the way are made. A link is followed, a device is written to.

    Raises:
        InputError: a folder, a file that may not be written, a full disk.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = _mode_of_writable(path)
        if mode is None or stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), content, mode)
        elif stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
            _write_all(_open_stream(path), content)
        else:
            raise InputError(f"{shown_path(path)}: expected a file to write, received {kind_of_file(mode)}; {REMEDY}")
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"{shown_path(path)}: expected a file that can be written: {reason(error)}; {REMEDY}"
        ) from error


def make_writable_folder(path: Path, option: str) -> None:
    """Make a folder and write into it once: results of hours must not fail on it.

    Raises:
        InputError: names the option.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = _new_name(path)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{option} {shown_path(path)}: expected a folder that can be written: {reason(error)}; {REMEDY}"
        ) from error


def _mode_of_writable(target: Path) -> int | None:
    """Mode of what stands there, None for nothing. A rename would replace even a file that may not be written."""
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
    """Short, whatever the length of the target's name."""
    return folder / f".tree_rl-{secrets.token_hex(8)}.new"


def _open_stream(target: Path) -> int:
    # A pipe that nobody reads refuses at once instead of blocking.
    descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return descriptor


def _write_all(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
