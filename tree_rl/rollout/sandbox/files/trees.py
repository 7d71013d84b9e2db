"""Measures, copies and deletes folders that an agent made. Depth and size are bounded."""

import logging
import math
import os
import stat
import subprocess
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from tree_rl.rollout.sandbox.files.descriptors import READ_FLAGS, folder_below, new_file, open_nofollow

logger = logging.getLogger(__name__)

ENTRY_BYTES = 4096
"""Smallest size that a file, folder or link counts: empty ones take space too."""
MAX_DEPTH = 128
"""Deepest nesting of folders. A deeper tree counts as too large."""
COPY_BYTES = 1 << 20


Parts = tuple[str, ...]
"""A path relative to the top."""


class TooLarge(ValueError):  # noqa: N818
    """A tree is too large or too deep."""


def entries_below(top: int, *, at_rest: bool = False) -> Iterator[tuple[Parts, os.stat_result]]:
    """Yield path and own status of everything below an open folder, a folder before its contents; follows no link.

    Args:
        at_rest: True if nothing changes the tree meanwhile, so every error is raised; False skips what disappears.

    Raises:
        TooLarge: deeper than `MAX_DEPTH`.
        OSError: a tree at rest cannot be read.
    """
    waiting: list[Parts] = [()]
    while waiting:
        parts = waiting.pop()
        if len(parts) > MAX_DEPTH:
            raise TooLarge(f"more than {MAX_DEPTH} folders within each other")
        try:
            # From the top each time: one descriptor per level could exceed the process's limit.
            with folder_below(top, parts) as folder, os.scandir(folder) as listed:
                for found in listed:
                    try:
                        status = found.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((*parts, found.name))
                    yield (*parts, found.name), status
        except (ValueError, OSError):
            if at_rest:
                raise


def use_of(top: int) -> float:
    """Bytes on disk below an open folder, at least `ENTRY_BYTES` per entry; infinite if deeper than `MAX_DEPTH`."""
    try:
        return sum(max(ENTRY_BYTES, status.st_blocks * 512) for _, status in entries_below(top))
    except TooLarge:
        return math.inf


def copy_tree(source: int, target: int, *, leave_out: Callable[[str], bool], max_bytes: int, owner: int | None) -> None:
    """Copy regular files, and links that stay inside, from one open folder to another, in which nothing may run.

    Files and links that the source lacks are deleted from the target.

    Args:
        leave_out: returns True for the relative path of a file or link to skip; the target keeps its own.
        max_bytes: limit for all copies together; a file or link counts at least `ENTRY_BYTES`.
        owner: user who gets the copies; None: this process's user.

    Raises:
        TooLarge: more than `max_bytes`, or too deep.
        ValueError: the target has a link or a folder where a file belongs, or the other way round.
        OSError: a file cannot be read or written.
    """
    total = 0
    given = list(entries_below(source, at_rest=True))
    _delete_others(target, {parts for parts, status in given if not stat.S_ISDIR(status.st_mode)}, leave_out)
    for parts, status in given:
        is_link = stat.S_ISLNK(status.st_mode)
        if not (is_link or stat.S_ISREG(status.st_mode)) or leave_out("/".join(parts)):
            continue
        total += max(ENTRY_BYTES, status.st_size)
        if total > max_bytes:
            raise TooLarge(f"the files to copy exceed {max_bytes} bytes")
        *folders, name = parts
        with folder_below(source, folders) as old, folder_below(target, folders, make=True, make_for=owner) as new:
            if is_link:
                _copy_link(old, new, name, depth=len(folders), owner=owner)
            else:
                _copy_file(old, new, name, max_bytes=status.st_size, owner=owner)


def _delete_others(target: int, given: Container[Parts], leave_out: Callable[[str], bool]) -> None:
    for parts, status in list(entries_below(target, at_rest=True)):
        *folders, name = parts
        if not (stat.S_ISDIR(status.st_mode) or parts in given or leave_out("/".join(parts))):
            with folder_below(target, folders) as folder:
                os.unlink(name, dir_fd=folder)


def _copy_file(old: int, new: int, name: str, *, max_bytes: int, owner: int | None) -> None:
    read = open_nofollow(name, READ_FLAGS, old)
    try:
        mode = os.fstat(read).st_mode
        if not stat.S_ISREG(mode):
            return
        with new_file(new, name, mode=stat.S_IMODE(mode) & 0o755 | 0o600, owner=owner) as made:
            while max_bytes > 0 and (sent := os.sendfile(made, read, None, min(max_bytes, COPY_BYTES))):
                max_bytes -= sent
    finally:
        os.close(read)


def _copy_link(old: int, new: int, name: str, *, depth: int, owner: int | None) -> None:
    target = os.readlink(name, dir_fd=old)
    if stays_inside(target, depth=depth):
        os.symlink(target, name, dir_fd=new)
        if owner is not None:
            os.chown(name, owner, owner, dir_fd=new, follow_symlinks=False)


def stays_inside(target: str, *, depth: int) -> bool:
    """Return True if a link, with `depth` folders above it in its tree, certainly leads into the tree.

    `..` may stand only at the start: after a name that is itself a link it could lead anywhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return bool(target) and not target.startswith("/") and ups <= depth and ".." not in parts[ups:]


def copy_exactly(source: Path, target: Path, *, owner: int | None) -> None:
    """Copy everything into an empty folder, with links, permissions and times. Nothing may run in either.

    `owner` is as in `copy_tree`. Raises `ValueError` if a file cannot be read or written.
    """
    # Neither command follows a link.
    commands = [["cp", "-a", "--", f"{source}/.", str(target)]]
    if owner is not None:
        commands.append(["chown", "-hR", f"{owner}:{owner}", "--", str(target)])
    for command in commands:
        done = subprocess.run(command, capture_output=True, errors="replace", env={"PATH": os.defpath}, check=False)
        if done.returncode:
            raise ValueError(f"the files cannot be copied: {done.stderr[:500]!a}")


def remove_tree(folder: Path) -> bool:
    """Delete a folder of any depth and with any permissions; return True if it is gone. Logs instead of raising."""
    reason = "it is a link"
    for command in () if folder.is_symlink() else (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if not folder.exists():
            break
        try:
            argv = [*command, "--", str(folder)]
            done = subprocess.run(argv, capture_output=True, errors="replace", env={"PATH": os.defpath}, check=False)
            reason = done.stderr
        except OSError as error:
            reason = str(error)
    if os.path.lexists(folder):
        logger.warning("cannot remove %s: %s", folder, ascii(reason[:500]))
        return False
    return True
