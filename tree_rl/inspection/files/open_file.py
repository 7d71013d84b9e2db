"""Opens a user's file: only regular files; a file that is not text is identified in the error."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted_path

SIGNATURES = (
    (b"PAR1", "a parquet file; name it *.parquet"),
    (b"\x1f\x8b", "a gzip file; unpack it with gunzip"),
    (b"PK\x03\x04", "a zip archive; unpack it with unzip"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it with unzstd"),
    (b"BZh", "a bzip2 file; unpack it with bunzip2"),
    (b"\xfd7zXZ", "an xz file; unpack it with unxz"),
    (b"\xef\xbb\xbf", "UTF-8 with a byte order mark; save it without one: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE"),
    (b"version https://git-lfs", "a pointer of Git LFS; fetch the file with git lfs pull"),
    (b"\xff\xfe", "UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
)
HEAD_BYTES = 64


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without blocking on a pipe; raises an `InputError` for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise InputError(f"{quoted_path(path)}: no such file; check the path") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise InputError(f"{quoted_path(path)}: expected a file, received {kind_of_file(mode)}; name a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """All bytes of a regular file; raises `InputError` like `open_regular`, or if reading fails."""
    with open_regular(path) as stream:
        try:
            return stream.read()
        except OSError as error:
            raise _unreadable(path, error) from error


def read_text(path: Path) -> str:
    """Text of a UTF-8 file; raises `InputError` like `read_bytes` and `decode_utf8`."""
    return decode_utf8(read_bytes(path), quoted_path(path))


def decode_utf8(data: bytes, where: str) -> str:
    """Decode UTF-8; raises an `InputError`, which begins with `where`, for other encodings and binary data."""
    if (kind := kind_of_bytes(data)) is not None:
        raise InputError(f"{where}: expected text in UTF-8, received {kind}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: expected text in UTF-8, received byte {data[error.start]:#04x} at {error.start}; convert it, "
            "from Latin-1 with iconv -f LATIN1 -t UTF-8"
        ) from error


def kind_of_bytes(data: bytes) -> str | None:
    """Kind of a file by its first bytes; None if it may be text."""
    known = next((kind for signature, kind in SIGNATURES if data.startswith(signature)), None)
    return "binary data or UTF-16 (zero bytes)" if known is None and b"\0" in data[:HEAD_BYTES] else known


def kind_of_file(mode: int) -> str:
    """Name of a file that is not regular (folder, pipe, socket, device) by its `st_mode`."""
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for holds, name in kinds if holds(mode)), "a device")


def reason(error: OSError | ValueError) -> str:
    """The system's error message, without the path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _unreadable(path: Path, error: OSError | ValueError) -> InputError:
    expected = "expected a file that can be read"
    return InputError(f"{quoted_path(path)}: {expected}: {reason(error)}; check the path and its permissions")
