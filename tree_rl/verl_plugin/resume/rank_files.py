"""Every rank writes its own files of a checkpoint through to its disk, measures them, and checks them before a load.

So the nodes share the work, and a checkpoint on disks that are not shared is checked where it lies.
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
"""An entry of verl's `checkpoint.load_contents` -> the name of its files."""


def rank_of_file(name: str, world_size: int) -> int:
    """The rank that a file of a worker group belongs to: the one that it names, else the first.

    Args:
        name: POSIX path below the folder of the worker group, such as `actor`.
        world_size: number of ranks.
    """
    match = RANK.search(name)
    return int(match[2]) if match and int(match[1]) == world_size and int(match[2]) < world_size else 0


def files_to_load(contents: Sequence[str], world_size: int, rank: int) -> list[str]:
    """The files below the folder of a worker group that verl loads on a rank.

    Args:
        contents: verl's `checkpoint.load_contents`.
        world_size: number of ranks.
        rank: one of them.
    """
    return [f"{name}_world_size_{world_size}_rank_{rank}.pt" for kind, name in KINDS.items() if kind in contents]


class CheckpointFilesWorker:
    """A base class of training workers: what the trainer asks of them about the files of their rank."""

    rank: int
    world_size: int

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seal_checkpoint_files(self, folder: str) -> dict[str, FileMark]:
        """Write this rank's files below a worker group's folder through to the disk; return what they hold."""
        place = Path(folder)
        return seal_files(place, [name for name in files_below(place) if self._is_mine(name)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def find_checkpoint_damage(
        self, folder: str, files: Mapping[str, FileMark] | None, contents: Sequence[str]
    ) -> str | None:
        """Name a damaged file of this rank; None if all are what was saved.

        Args:
            folder: of the worker group in the checkpoint.
            files: of all ranks, as recorded, by their paths below `folder`; None without a record.
            contents: verl's `checkpoint.load_contents`.
        """
        mine = {name: mark for name, mark in (files or {}).items() if self._is_mine(name)}
        unrecorded = [name for name in files_to_load(contents, self.world_size, self.rank) if name not in mine]
        return why_damaged(Path(folder), mine) or why_unreadable_files(Path(folder), unrecorded)

    def _is_mine(self, name: str) -> bool:
        return rank_of_file(name, self.world_size) == self.rank
