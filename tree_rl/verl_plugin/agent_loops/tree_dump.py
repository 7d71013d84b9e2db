"""Finished rows in files, one JSON line each, for `tree-rl inspect` and `tree-rl view`."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TRAIN_FILE = re.compile(r"train-step(\d{6,})-\d+\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRow:
    """One row of a finished session."""

    uid: str
    """The prompt's."""
    session: int
    """Sample of the group."""
    index: int
    """Branch of the session."""
    step: int
    """Trainer step that asked for it."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    """1 where trained."""
    reward: float | None
    """None until a reward model has judged it."""
    agents: tuple[str, ...] = ()
    """Who asked for the tokens that the model drew in it. Empty if its agent loop does not say."""
    sides: tuple[str, ...] = ()
    """Kinds of side calls among them."""
    response_weights: tuple[float, ...] | None = None
    """What each response token counts; None if every trained token counts 1."""
    weight_version: int | None = None
    """Newest weights that answered in it, as trainer steps; None if the rollout engine does not say."""

    @property
    def key(self) -> str:
        """verl's row key."""
        return f"{self.uid}_{self.session}_{self.index}"


def append_tree(folder: Path, partition: str, rows: Sequence[FinishedRow]) -> Path:
    """Append the rows of one prompt of partition "train" or "val"; creates the folder.

    Returns:
        The file: one per partition, step and writing process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{partition}-step{rows[0].step:06d}-{os.getpid()}.jsonl"
    text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    with path.open("a") as stream:
        stream.write(text)
    return path


def set_aside_later_trees(folder: Path, step: int) -> None:
    """Rename the training dumps of steps after `step`, which a restart repeats, so that no row is read twice."""
    for path in sorted(folder.glob("train-*.jsonl")):
        match = TRAIN_FILE.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.replace(path.with_suffix(".replaced"))
