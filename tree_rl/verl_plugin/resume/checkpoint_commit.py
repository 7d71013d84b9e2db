"""Begins and ends the writing of a checkpoint; training never resumes from one that was not ended.

A checkpoint is whole once it has a record of its files, written after all of them are on the disk.
"""

import logging
import re
import time
from collections.abc import Container, Mapping
from pathlib import Path

from tree_rl.rollout.sandbox.files.trees import remove_tree
from tree_rl.verl_plugin.resume.checkpoint_record import (
    DamagedCheckpointError,
    Record,
    read_record,
    write_atomically,
    write_record,
)
from tree_rl.verl_plugin.resume.file_marks import FileMark, sync_folder

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
REMOVED = ".removed-"
"""What a kill interrupted the removal of is named so."""
FOLDER = re.compile("global_step_([1-9][0-9]{0,15})")


def folder_of_step(root: Path, step: int) -> Path:
    """The folder of a checkpoint in `root`, `trainer.default_local_dir`."""
    return root / f"global_step_{step}"


def steps_in(root: Path) -> list[int]:
    """Steps of everything that has the name of a checkpoint, in rising order."""
    return sorted(int(match[1]) for path in root.iterdir() if (match := FOLDER.fullmatch(path.name)))


def begin_checkpoint(root: Path, step: int) -> Path:
    """Make the folder of a checkpoint and mark it as unfinished; what had its name before is removed."""
    folder = folder_of_step(root, step)
    for rest in root.glob(f"{REMOVED}*"):
        _delete(rest)
    if folder.exists() or folder.is_symlink():
        # verl would write through a link, or fail at a folder that has the name of one of its files.
        _remove(folder)
    folder.mkdir(parents=True)
    write_record(folder, Record(is_whole=False, files={}))
    sync_folder(root)
    return folder


def commit_checkpoint(root: Path, step: int, files: Mapping[str, FileMark]) -> None:
    """Record the files of a checkpoint, all of them on the disk by now: it counts as whole. Then name it as the last.

    Args:
        root: `trainer.default_local_dir`.
        step: of the checkpoint.
        files: POSIX path below the checkpoint's folder -> what the file holds, as `seal_files` returns it.
    """
    write_record(folder_of_step(root, step), Record(is_whole=True, files=files))
    write_atomically(root / TRACKER, str(step).encode())


def remove_old_checkpoints(root: Path, keep: int, damaged: Container[int] = ()) -> None:
    """Keep the newest `keep` whole checkpoints. Unlike verl, count those of earlier starts of this run too.

    `damaged` are steps whose checkpoints count for nothing; they stay for somebody to look at.
    """
    whole = [step for step in steps_in(root) if step not in damaged and _is_committed(folder_of_step(root, step))]
    for step in whole[:-keep]:
        _remove(folder_of_step(root, step))


def _is_committed(folder: Path) -> bool:
    """Whether the record says so; reading the files would take as long as saving them."""
    try:
        record = read_record(folder)
    except DamagedCheckpointError:
        return False
    return record is not None and record.is_whole


def _remove(folder: Path) -> None:
    """Remove a checkpoint; from the first moment on, nothing takes its rest for one."""
    doomed = folder.with_name(f"{REMOVED}{folder.name}-{time.time_ns()}")
    folder.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder, a file or a link; what cannot be deleted is logged and stays."""
    try:
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
