"""The record of a checkpoint: its files with sizes and checksums, and whether all of them were written.

verl only has `latest_checkpointed_iteration.txt`, which it writes in place, so a kill can leave it empty.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tree_rl.verl_plugin.resume.file_marks import FileMark, read_regular, sync_folder

RECORD = "tree_checkpoint.json"
STATE = "tree_trainer.json"
"""File of a checkpoint with the trainer's state that verl does not save."""
VERSION = 2
SHA256 = re.compile("[0-9a-f]{64}")


class DamagedCheckpointError(ValueError):
    """A checkpoint has changed since it was saved; the message names a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The contents of a checkpoint."""

    is_whole: bool
    """False from the start of its writing until all files are on the disk."""
    files: Mapping[str, FileMark]
    """Marks of the files by POSIX path below the checkpoint's folder; empty until the checkpoint is whole."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: a reader sees the old or the new content, even after a kill or a power failure.

    Renames a folder with this name, which our jobs never create.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.folder-{os.getpid()}"))
    temporary.replace(path)
    sync_folder(path.parent)


def write_record(folder: Path, record: Record) -> None:
    """Write the record of a checkpoint atomically."""
    files = {name: {"bytes": mark.size_bytes, "sha256": mark.sha256} for name, mark in sorted(record.files.items())}
    entries = {"version": VERSION, "folder": folder.name, "is_whole": record.is_whole}
    entries |= {"files": files, "sha256_of_files": _digest(files)}
    write_atomically(folder / RECORD, json.dumps(entries, indent=1).encode())


def read_record(folder: Path) -> Record | None:
    """The record of a checkpoint; None for a checkpoint of stock verl, which has none.

    Raises:
        DamagedCheckpointError: the record is damaged, has an unknown version, or is missing although tree_rl wrote the
            checkpoint.
    """
    path = folder / RECORD
    if not folder.is_dir():
        raise DamagedCheckpointError(f"{folder} is no folder")
    content, reason = read_regular(path)
    if reason is not None:
        raise DamagedCheckpointError(f"{path} cannot be read: {reason}")
    if content is None:
        if (folder / STATE).exists() or any(folder.glob("*/tree_engine_*.json")):
            raise DamagedCheckpointError(f"{path} is missing")
        return None
    try:
        return _parse(json.loads(content), folder.name)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error


def _parse(entries: Any, folder: str) -> Record:
    """Convert JSON to a record; raises a ValueError that says what is wrong."""
    if not isinstance(entries, dict) or not isinstance(entries.get("is_whole"), bool):
        raise ValueError("expected an object with `is_whole`")
    if not entries["is_whole"]:
        return Record(is_whole=False, files={})
    version, files = entries.get("version"), entries.get("files")
    if version != VERSION:
        raise ValueError(f"version {version!r:.40}, expected {VERSION}; another version of tree_rl wrote it")
    if not isinstance(files, dict) or not files:
        raise ValueError("expected an object `files`")
    if entries.get("folder") != folder:
        raise ValueError(
            f"it belongs to {entries.get('folder')!r:.100}, not to {folder!r}, whose step verl would go on with"
        )
    if entries.get("sha256_of_files") != _digest(files):
        raise ValueError("the list of files has changed since it was written")
    return Record(is_whole=True, files={_checked_name(name): _mark(name, entry) for name, entry in files.items()})


def _mark(name: str, entry: Any) -> FileMark:
    size, sha256 = (entry.get("bytes"), str(entry.get("sha256"))) if isinstance(entry, dict) else (None, "")
    if type(size) is not int or size < 0 or not SHA256.fullmatch(sha256):
        raise ValueError(f"expected size and SHA-256 of {name!r:.200}")
    return FileMark(size_bytes=size, sha256=sha256)


def _checked_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ValueError(f"{name!r:.200} is no file of a checkpoint")
    return name


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
