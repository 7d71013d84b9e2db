"""Every rank flushes its files of a checkpoint to its disk, computes their marks, and checks them before a load.

So the nodes share the work, and checkpoints on local disks are checked on their node.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.single_controller.base.decorator import Dispatch, register

from tree_rl.verl_plugin.resume.file_marks import (
    FileMark,
    files_below,
    seal_files,
    why_damaged,
    why_unreadable_files,
)

RANK = re.compile(r"_world_size_(\d+)_rank_(\d+)\.\w+")
KINDS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""Prefix of the files of each entry of verl's `checkpoint.load_contents`."""


def rank_of_file(name: str, world_size: int) -> int:
    """The rank to which a file below a worker group's folder belongs: the rank in its name, else the first."""
    match = RANK.search(name)
    return int(match[2]) if match and int(match[1]) == world_size and int(match[2]) < world_size else 0


def files_to_load(contents: Sequence[str], world_size: int, rank: int) -> list[str]:
    """The files below a worker group's folder that verl loads on a rank; `contents` is its `load_contents`."""
    return [f"{name}_world_size_{world_size}_rank_{rank}.pt" for kind, name in KINDS.items() if kind in contents]


class CheckpointFilesWorker:
    """A base class of training workers with the trainer's calls about the files of their rank."""

    rank: int
    world_size: int

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seal_checkpoint_files(self, folder: str) -> dict[str, FileMark]:
        """Flush this rank's files below a worker group's folder to the disk; return their marks."""
        place = Path(folder)
        return seal_files(place, [name for name in files_below(place) if self._is_mine(name)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def find_checkpoint_damage(
        self, folder: str, files: Mapping[str, FileMark] | None, contents: Sequence[str]
    ) -> str | None:
        """Name a damaged file of this rank below a worker group's folder; None if there is none.

        `files` has the recorded marks of all ranks' files, None without a record; `contents` is as in `files_to_load`.
        """
        mine = {name: mark for name, mark in (files or {}).items() if self._is_mine(name)}
        unrecorded = [name for name in files_to_load(contents, self.world_size, self.rank) if name not in mine]
        return why_damaged(Path(folder), mine) or why_unreadable_files(Path(folder), unrecorded)

    def _is_mine(self, name: str) -> bool:
        return rank_of_file(name, self.world_size) == self.rank
