"""Writes finished rows to files and reads them, one JSON line each; `tree-rl inspect` and `view` read them too."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tree_rl.verl_plugin.agent_loops.image_spans import Span

TRAIN_FILE = re.compile(r"train-step(\d{6,})-\d+\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRow:
    """One row of a finished session."""

    uid: str
    session: int
    """Index of the session among those of the prompt."""
    index: int
    """Index of the branch in the session."""
    step: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    """1 for trained tokens, otherwise 0."""
    reward: float | None
    """Reward; None until a reward model has computed it."""
    agents: tuple[str, ...] = ()
    """Agents whose calls generated the row's tokens; empty if the agent loop reports none."""
    sides: tuple[str, ...] = ()
    """Kinds of side calls among these calls."""
    response_weights: tuple[float, ...] | None = None
    """Weight of each response token; None if every trained token has weight 1."""
    weight_version: int | None = None
    """Trainer step of the newest weights that generated its tokens; None if the rollout engine reports none."""
    image_spans: tuple[Span, ...] = ()
    """Images of the row; empty for text. Not written to files."""

    @property
    def key(self) -> str:
        return f"{self.uid}_{self.session}_{self.index}"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids


def append_tree(folder: Path, partition: str, rows: Sequence[FinishedRow]) -> Path:
    """Append the rows of one prompt of partition "train" or "val" to a file per partition, step and process.

    Creates the folder and returns the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{partition}-step{rows[0].step:06d}-{os.getpid()}.jsonl"
    fields = [asdict(row) for row in rows]
    text = "".join(json.dumps({name: one[name] for name in one if name != "image_spans"}) + "\n" for one in fields)
    with path.open("a") as stream:
        stream.write(text)
    return path


def read_trees(folder: Path, step: int) -> list[FinishedRow]:
    """All rows of a training step, those of a prompt together; raises a FileNotFoundError if there are none."""
    files = sorted(folder.glob(f"train-step{step:06d}-*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{folder}: no rows of step {step}; was rollout.custom.tree_dump_dir set?")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = []
    for record in records:
        fields: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in record.items()}
        rows.append(FinishedRow(**fields))
    return sorted(rows, key=lambda row: row.uid)


def set_aside_later_trees(folder: Path, step: int) -> None:
    """Rename training dumps of steps after `step`, which a restart repeats, so that no row is read twice."""
    for path in sorted(folder.glob("train-*.jsonl")):
        match = TRAIN_FILE.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.replace(path.with_suffix(".replaced"))
