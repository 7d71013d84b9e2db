"""Begins, commits and sets aside checkpoints; training never resumes from one that was not committed.

A checkpoint is whole once it has a record of its files, which is written after all of them are on the disk.
"""

import logging
import os
import re
import time
from collections.abc import Mapping
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
"""Prefix of folders that are being deleted, some of them by a process that was killed."""
REPLACED = "replaced_"
"""Prefix of checkpoints after the step from which training continued."""
FOLDER = re.compile("global_step_([1-9][0-9]{0,15})")


def folder_of_step(root: Path, step: int) -> Path:
    """The folder of a checkpoint in `root`, `trainer.default_local_dir`."""
    return root / f"global_step_{step}"


def steps_in(root: Path) -> list[int]:
    """Steps of everything with the name of a checkpoint, in ascending order."""
    return sorted(int(match[1]) for path in root.iterdir() if (match := FOLDER.fullmatch(path.name)))


def begin_checkpoint(root: Path, step: int) -> Path:
    """Create the folder of a checkpoint and mark it as unfinished; deletes anything with its name."""
    folder = folder_of_step(root, step)
    for rest in root.glob(f"{REMOVED}*"):
        _delete(rest)
    if folder.exists() or folder.is_symlink():
        # verl would write through a link, or fail on a folder with the name of one of its files.
        _remove(folder)
    folder.mkdir(parents=True)
    write_record(folder, Record(is_whole=False, files={}))
    sync_folder(root)
    return folder


def commit_checkpoint(root: Path, step: int, files: Mapping[str, FileMark]) -> None:
    """Record the files of a checkpoint, all of which are on the disk; this makes it whole. verl's tracker names it."""
    write_record(folder_of_step(root, step), Record(is_whole=True, files=files))
    write_atomically(root / TRACKER, str(step).encode())


def set_aside_later_checkpoints(root: Path, step: int) -> None:
    """Rename the checkpoints after `step`, from which training has continued, before the first new one is saved.

    They are damaged, or of a run that this one does not continue. They would be newer than all that it saves: a restart
    would take them, and they would count among those to keep. Interrupted ones never count and stay.
    """
    if not root.is_dir():
        return
    later = [folder_of_step(root, one) for one in steps_in(root) if one > step]
    later = [folder for folder in later if _is_whole(folder) is not False]
    if later and folder_of_step(root, step).is_dir():
        write_atomically(root / TRACKER, str(step).encode())
    elif later:
        (root / TRACKER).unlink(missing_ok=True)
    for folder in later:
        aside = folder.with_name(REPLACED + folder.name)
        if os.path.lexists(aside):
            aside = aside.with_name(f"{aside.name}-{time.time_ns()}")
        folder.rename(aside)
        logger.warning("training continued from step %d: %s is now %s", step, folder, aside.name)


def remove_old_checkpoints(root: Path, keep: int) -> None:
    """Keep the newest `keep` whole checkpoints. Unlike verl, also counts those of earlier starts of this run."""
    whole = [step for step in steps_in(root) if _is_whole(folder_of_step(root, step))]
    for step in whole[:-keep]:
        _remove(folder_of_step(root, step))


def _is_whole(folder: Path) -> bool | None:
    """What the record says; None if it cannot be read or, in stock verl's, is missing.

    Does not read the files, which would take as long as saving them.
    """
    try:
        record = read_record(folder)
    except DamagedCheckpointError:
        return None
    return None if record is None else record.is_whole


def _remove(folder: Path) -> None:
    """Delete a checkpoint. Renames it first, so that its rest is never taken for a checkpoint."""
    doomed = folder.with_name(f"{REMOVED}{folder.name}-{time.time_ns()}")
    folder.rename(doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder, a file or a link; logs what cannot be deleted."""
    try:
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)
