"""What a run achieved, read from the files that it left, and the table printed at its end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from quickstart.progress import read_steps

EDGE_STEPS = 5
CPU_CAVEAT = (
    "On a CPU the update can beat its token bound: rows attend through dense masks, whose cost grows faster than their "
    "tokens. Do not expect this ratio on a GPU (docs/benchmarks)."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of repeated updates on one batch."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        """Middle value."""
        return median(self.seconds)

    def __str__(self) -> str:
        return f"{self.median:.2f} s ({min(self.seconds):.2f} to {max(self.seconds):.2f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Figures of a run, one entry per GRPO step in every sequence."""

    reward: np.ndarray
    """Mean over sessions."""
    flat_tokens: np.ndarray
    """Tokens of all rows."""
    unique_tokens: np.ndarray
    """Tokens of their trees."""
    step_seconds: np.ndarray
    """Wall-clock time of a step."""
    self_check_error: float
    """Largest difference between tree and rows that the engine's self-check found in the run (log-probs)."""
    replay_rows: int
    """Rows of the replayed batch."""
    tree: Timing
    """Updates of the replayed batch as trees."""
    flat: Timing
    """Updates of the same rows, each computed alone, by stock verl's engine."""
    log_prob_error: float
    """Largest difference between the two in that batch, absolute."""
    gradient_error: float
    """Largest difference between the two gradients of a parameter, relative to its norm."""

    @property
    def first_reward(self) -> float:
        """Mean reward of the first steps."""
        return float(self.reward[:EDGE_STEPS].mean())

    @property
    def last_reward(self) -> float:
        """Mean reward of the last steps."""
        return float(self.reward[-EDGE_STEPS:].mean())

    @property
    def replay_bound(self) -> float:
        """Token bound of the replayed batch, which is the first step's."""
        return float(self.flat_tokens[0] / self.unique_tokens[0])

    @property
    def por(self) -> np.ndarray:
        """Potential overlap ratio: the share of flat tokens that trees need not compute."""
        return 1.0 - self.unique_tokens / self.flat_tokens

    @property
    def overall_por(self) -> float:
        """The same over all steps together."""
        return float(1.0 - self.unique_tokens.sum() / self.flat_tokens.sum())


def read_summary(metrics: Path, replayed: Path) -> Summary:
    """Read a run.

    Args:
        metrics: What verl's `file` logger wrote.
        replayed: What `replay` wrote.

    Raises:
        ValueError: too few steps.
    """
    steps = [data for _, data in read_steps(metrics) if "tree/session_score/mean" in data]
    if len(steps) < 2 * EDGE_STEPS:
        raise ValueError(f"{metrics}: expected at least {2 * EDGE_STEPS} steps, received {len(steps)}; raise STEPS")
    result: Mapping[str, Any] = json.loads(replayed.read_text())

    def column(name: str) -> np.ndarray:
        return np.array([data[name] for data in steps], dtype=np.float64)

    return Summary(
        reward=column("tree/session_score/mean"),
        flat_tokens=column("tree/flat_tokens"),
        unique_tokens=column("tree/unique_tokens"),
        step_seconds=column("timing_s/step"),
        self_check_error=float(column("tree/self_check_error").max()),
        replay_rows=int(result["rows"]),
        tree=Timing(seconds=result["seconds"]["tree"]),
        flat=Timing(seconds=result["seconds"]["flat"]),
        log_prob_error=float(result["log_prob_error"]),
        gradient_error=float(result["gradient_error"]),
    )


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the table: what, and its value."""
    return [
        (f"mean reward, first {EDGE_STEPS} steps", f"{summary.first_reward:.3f}"),
        (
            f"mean reward, last {EDGE_STEPS} steps",
            f"{summary.last_reward:.3f}  ({summary.last_reward - summary.first_reward:+.3f})",
        ),
        ("flat tokens a step", f"{summary.flat_tokens.mean():,.0f}"),
        ("unique tokens a step", f"{summary.unique_tokens.mean():,.0f}"),
        (
            "POR (tokens that trees save)",
            f"{summary.overall_por:.3f}  (token bound {1 / (1 - summary.overall_por):.1f} x)",
        ),
        (f"update as trees, {summary.replay_rows} rows", str(summary.tree)),
        ("update as rows, the same batch", str(summary.flat)),
        (
            "speed-up of the update",
            f"{summary.flat.median / summary.tree.median:.1f} x  (the batch's token bound: {summary.replay_bound:.1f})",
        ),
        ("self-check error (log-probs)", f"{max(summary.self_check_error, summary.log_prob_error):.1e}"),
        ("gradient difference (relative)", f"{summary.gradient_error:.1e}"),
    ]


def step_table(summary: Summary, *, every: int = 5) -> list[str]:
    """Return lines of figures by step, every few steps."""
    lines = ["step   reward   flat tokens   unique tokens     POR   seconds"]
    for index in range(len(summary.reward)):
        if index % every == 0 or index == len(summary.reward) - 1:
            lines.append(
                f"{index + 1:4d}   {summary.reward[index]:6.3f}   {summary.flat_tokens[index]:11,.0f}"
                f"   {summary.unique_tokens[index]:13,.0f}   {summary.por[index]:5.3f}"
                f"   {summary.step_seconds[index]:7.1f}"
            )
    return lines
