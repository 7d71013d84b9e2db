"""Seals and checks a whole checkpoint: the trainer's files, and the folders that worker groups write and check.

Every rank checks its files, so that all nodes resume from the checkpoint that the trainer names.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tree_rl.verl_plugin.resume.checkpoint_record import RECORD, DamagedCheckpointError, Record, read_record
from tree_rl.verl_plugin.resume.file_marks import (
    FileMark,
    files_below,
    seal_files,
    why_damaged,
    why_unreadable_files,
    why_wrong_size,
)
from tree_rl.verl_plugin.resume.rank_files import RANK

logger = logging.getLogger(__name__)

PART_FOLDERS = ("actor", "critic")
DATA_FILE = "data.pt"
"""verl's position in the data set; the last file that it writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A folder of a checkpoint, and the workers that write it."""

    folder: str
    """Name of the folder, one of PART_FOLDERS."""
    workers: Any
    """verl's worker group; its workers are CheckpointFilesWorkers."""
    contents: Sequence[str]


def seal_checkpoint(folder: Path, parts: Sequence[Part]) -> dict[str, FileMark]:
    """Flush every file of a checkpoint to the disk; return their marks by path below `folder`."""
    marks = seal_files(folder, [name for name in files_below(folder) if _is_trainers(name) and RECORD not in name])
    for part in parts:
        for marks_of_rank in part.workers.seal_checkpoint_files(str(folder / part.folder)):
            marks |= {f"{part.folder}/{name}": mark for name, mark in marks_of_rank.items()}
    return marks


def why_checkpoint_damaged(folder: Path, record: Record | None, parts: Sequence[Part]) -> str | None:
    """Name a damaged file among those that verl would load from a checkpoint; None if there is none.

    Stock verl's have no record. Raises a ValueError if the checkpoint is from a job with another number of ranks.
    """
    if record is None:
        logger.warning("%s has no record, as stock verl wrote it: only CRC-32s of its .pt files can be checked", folder)
        damage = why_unreadable_files(folder, [DATA_FILE])
    else:
        damage = why_damaged(folder, {name: mark for name, mark in record.files.items() if _is_trainers(name)})
    for part in parts:
        if damage is not None:
            return damage
        files = None if record is None else _files_of_part(record, part)
        answers = part.workers.find_checkpoint_damage(str(folder / part.folder), files, list(part.contents))
        damage = next((answer for answer in answers if answer is not None), None)
    return damage


def refuse_damaged(folder: Path) -> None:
    """Raise a ValueError if the checkpoint in `trainer.resume_from_path` is damaged, as far as this node can see.

    Its files may be on disks of other nodes; the ranks check them later.
    """
    try:
        record = read_record(folder)
    except DamagedCheckpointError as error:
        raise refusal(folder, str(error)) from error
    if record is None:
        return
    if not record.is_whole:
        raise refusal(folder, "its writing was interrupted")
    paths = {folder / name: mark for name, mark in record.files.items()}
    reasons = (why_wrong_size(path, mark) for path, mark in paths.items() if os.path.lexists(path))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        raise refusal(folder, reason)


def refusal(folder: Path, reason: str) -> ValueError:
    """The error for a checkpoint in the config that is not whole."""
    return ValueError(
        f"trainer.resume_from_path={folder}: {reason}; expected a whole checkpoint. Name another one, or set "
        "trainer.resume_mode=auto, which takes the newest whole one of trainer.default_local_dir"
    )


def _files_of_part(record: Record, part: Part) -> Mapping[str, FileMark]:
    """The recorded files of a worker group, by their paths below its folder."""
    before = f"{part.folder}/"
    files = {name.removeprefix(before): mark for name, mark in record.files.items() if name.startswith(before)}
    saved_by = {int(match[1]) for name in files if (match := RANK.search(name))}
    ranks = part.workers.world_size
    if saved_by and ranks not in saved_by:
        raise ValueError(
            f"the checkpoint's folder {part.folder} was saved by {max(saved_by)} ranks, and this job has {ranks}; "
            "start with as many (trainer.nnodes x trainer.n_gpus_per_node), or convert it with verl.model_merger and "
            "name the result as the model's path"
        )
    return files


def _is_trainers(name: str) -> bool:
    return name.partition("/")[0] not in PART_FOLDERS
