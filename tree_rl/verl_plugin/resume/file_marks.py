"""Size and SHA-256 of files: recorded, after a flush to the disk, on saving, and compared before loading.

Files are streamed; several are read at once, because hashing a file occupies one core.
"""

import contextlib
import errno
import hashlib
import io
import os
import pickle
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

THREADS = 4
"""Number of files that one process reads at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileMark:
    """Size and checksum of a file."""

    size_bytes: int
    sha256: str
    """Checksum in hexadecimal."""


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading; raises an OSError for anything else, such as a link."""
    # Without O_NONBLOCK, opening a named pipe would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return io.FileIO(descriptor, closefd=True)


def read_regular(path: Path) -> tuple[bytes | None, str | None]:
    """Content of a regular file, None if there is none; and the reason if it cannot be read."""
    try:
        with open_regular(path) as stream:
            return stream.readall(), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, str(error.strerror)


def seal_files(folder: Path, names: Iterable[str]) -> dict[str, FileMark]:
    """Flush files and their folders to the disk; return the files' marks."""
    names = sorted(names)

    def seal(name: str) -> FileMark:
        with open_regular(folder / name) as stream:
            os.fsync(stream.fileno())
            return FileMark(size_bytes=os.fstat(stream.fileno()).st_size, sha256=_digest(stream))

    with ThreadPoolExecutor(THREADS) as pool:
        marks = dict(zip(names, pool.map(seal, names), strict=True))
    # A file whose folder is not flushed may lose its name.
    for parent in sorted({parent for name in names for parent in Path(name).parents}):
        sync_folder(folder / parent)
    return marks


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def why_damaged(folder: Path, files: Mapping[str, FileMark]) -> str | None:
    """Name a file that is missing or differs from its mark; None if there is none.

    Compares sizes first, so that a truncated file is found before any file is read.
    """
    for name, mark in files.items():
        reason = why_wrong_size(folder / name, mark)
        if reason is not None:
            return reason

    with ThreadPoolExecutor(THREADS) as pool:
        compared = pool.map(lambda name: _why_changed(folder / name, files[name].sha256), files)
        return next((reason for reason in compared if reason is not None), None)


def why_unreadable_files(folder: Path, names: Iterable[str]) -> str | None:
    """Name a file of torch that is missing or, by the CRC-32 of its entries, damaged; None if there is none."""
    return next((reason for name in names if (reason := _why_unreadable(folder / name)) is not None), None)


def why_wrong_size(path: Path, mark: FileMark) -> str | None:
    """Name a file that is missing, not regular or has another size than recorded; None if it is right."""
    try:
        status = path.lstat()
    except OSError as error:
        return _cannot_read(path, error)
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file"
    if status.st_size != mark.size_bytes:
        return f"{path} has {status.st_size} bytes, expected {mark.size_bytes}"
    return None


def files_below(folder: Path) -> Iterator[str]:
    """POSIX paths of all regular files below a folder; none if there is no folder."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, _, names in os.walk(folder, onerror=refuse):
        for path in (Path(place, name) for name in names):
            if path.is_file() and not path.is_symlink():
                yield path.relative_to(folder).as_posix()


def _digest(stream: io.FileIO) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()


def _why_changed(path: Path, sha256: str) -> str | None:
    try:
        with open_regular(path) as stream:
            got = _digest(stream)
    except OSError as error:
        return _cannot_read(path, error)
    return None if got == sha256 else f"{path} has changed: its SHA-256 is {got[:12]}..., expected {sha256[:12]}..."


def _why_unreadable(path: Path) -> str | None:
    try:
        with open_regular(path) as stream:
            wrong = _wrong_entry(zipfile.ZipFile(stream))
            if wrong is not None:
                return f"{path} has changed: {wrong!r:.200} in it is not what torch wrote"
            # torch is stricter than Python's zipfile. `weights_only` refuses the archive's other objects, so nothing is
            # unpickled and no tensor is read.
            with contextlib.suppress(pickle.UnpicklingError):
                torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OverflowError, RuntimeError, ValueError) as error:
        return f"{path} is garbage: {error!r:.200}"
    except OSError as error:
        return _cannot_read(path, error)
    return None


def _wrong_entry(archive: zipfile.ZipFile) -> str | None:
    """An entry with a wrong CRC-32, or with DOS's attribute of a folder, which torch would read as empty."""
    marked = (entry.filename for entry in archive.infolist() if entry.external_attr & 0x10)
    return archive.testzip() or next(marked, None)


def _cannot_read(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path} is missing"
    if error.errno == errno.ELOOP:
        return f"{path} is a link, expected a file"
    return f"{path} cannot be read: {error.strerror}"
