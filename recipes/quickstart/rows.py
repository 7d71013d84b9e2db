"""Rows of a rollout step as the agent loop dumped them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpedRow:
    """One branch of one session."""

    uid: str
    """Group: the task."""
    session: int
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    reward: float

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids


def read_step(folder: Path, step: int) -> list[DumpedRow]:
    """Read all rows of a training step.

    Args:
        folder: `rollout.custom.tree_dump_dir`.
        step: Trainer step, from 1.

    Returns:
        Rows, those of a task together.

    Raises:
        FileNotFoundError: nothing was dumped for the step.
    """
    files = sorted(folder.glob(f"train-step{step:06d}-*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{folder}: no rows of step {step}; was rollout.custom.tree_dump_dir set?")
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = [DumpedRow(**{name: record[name] for name in DumpedRow.__dataclass_fields__}) for record in records]
    return sorted(rows, key=lambda row: row.uid)


def group_advantages(rows: list[DumpedRow]) -> np.ndarray:
    """GRPO's advantage of every row: its session's reward against the other sessions of the task.

    Args:
        rows: Complete groups.

    Returns:
        float32 [rows].
    """
    advantages = np.zeros(len(rows), dtype=np.float32)
    for uid in {row.uid for row in rows}:
        members = [index for index, row in enumerate(rows) if row.uid == uid]
        rewards = {rows[index].session: rows[index].reward for index in members}
        values = np.array(list(rewards.values()))
        for index in members:
            advantages[index] = (rows[index].reward - values.mean()) / (values.std(ddof=1) + 1e-6)
    return advantages
