"""Metrics of a run, from the JSON lines of verl's `file` logger or the text of its console logger."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.open_file import read_bytes
from tree_rl.inspection.files.quoting import quoted_path
from tree_rl.tree.report.counted import counted

MARKS = ("timing_s/step", "train/loss")
"""Metrics that only a training step has, in reinforcement learning and in SFT."""
LARGEST = 1e100
"""Larger metrics are left out, like NaN: the sums and axes of charts would overflow."""
MOST_STEPS = 10**18
CONSOLE = re.compile(r"step:(\d{1,18}) - (.+)")
NUMBER = r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf)"
FIGURE = re.compile(rf"([\w@./-]+):(?:np\.\w+\()?({NUMBER})\)?(?= - |\s*$)", re.IGNORECASE)
"""A metric in a line of the console; numbers of NumPy are written as np.float64(1.5)."""
EXPECTED = "expected a file of verl's file logger or a console log with steps; set trainer.logger=[console,file]"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """Metrics by step; a restart replaces all steps from the one with which it goes on."""

    name: str
    """Quoted path of the log."""
    steps: tuple[int, ...]
    """Step numbers, ascending."""
    metrics: tuple[Mapping[str, float], ...]
    """Metrics of each step, numbers up to `LARGEST` only."""
    restarts: int
    """How often the step number went back."""

    def column(self, name: str) -> list[float | None]:
        """One metric by step; None for a step without it."""
        return [metrics.get(name) for metrics in self.metrics]

    def has(self, name: str) -> bool:
        """True if any step has the metric."""
        return any(name in metrics for metrics in self.metrics)

    def latest(self, name: str) -> float | None:
        """Last value of a metric; None without any."""
        return next((metrics[name] for metrics in reversed(self.metrics) if name in metrics), None)

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the steps that have it; None without any."""
        values = [value for value in self.column(name) if value is not None]
        return sum(values) / len(values) if values else None


def read_run(path: Path) -> RunLog:
    """Read a log file, or the newest log with steps in a run's folder; raises InputError if there is none."""
    if not path.is_dir():
        log = read_log(path)
        if log is None:
            raise InputError(f"{quoted_path(path)}: {EXPECTED}, found no step")
        return log
    files = [file for ending in ("jsonl", "log", "txt") for file in path.glob(f"*.{ending}") if file.is_file()]
    read = [
        (file.suffix == ".jsonl", file.stat().st_mtime, log) for file in files if (log := read_log(file)) is not None
    ]
    if not read:
        raise InputError(f"{quoted_path(path)}: {EXPECTED}, found none in {counted(len(files), 'file')}")
    # Prefer the file logger, whose metrics the console log repeats; then the newest, since an SFT phase comes first.
    return max(read, key=lambda one: (one[0], one[1]))[2]


def read_log(path: Path) -> RunLog | None:
    """The steps of one file, None if it has none; raises InputError if it cannot be read."""
    found: dict[int, Mapping[str, float]] = {}
    last, restarts = -1, 0
    # Editors on Windows write a byte order mark, which would hide the first step.
    text = read_bytes(path).decode("utf-8-sig", "replace")
    # By content, because the file logger's path can be anything.
    for step, metrics in list(_json_steps(text)) or _console_steps(text):
        if is_step(metrics):
            if step < last:
                restarts += 1
                found = {earlier: kept for earlier, kept in found.items() if earlier < step}
            last = step
        # Validation may log separate lines for the same step.
        found[step] = {**found.get(step, {}), **metrics}
    steps = sorted(step for step, metrics in found.items() if is_step(metrics))
    if not steps:
        return None
    chosen = tuple(found[step] for step in steps)
    return RunLog(name=quoted_path(path), steps=tuple(steps), metrics=chosen, restarts=restarts)


def read_steps(path: Path) -> list[tuple[int, Mapping[str, float]]]:
    """The steps that verl's `file` logger has written so far, line by line; none if there is no file yet."""
    return list(_json_steps(path.read_text(encoding="utf-8"))) if path.exists() else []


def is_step(metrics: Mapping[str, float]) -> bool:
    """True if a line's metrics are those of a training step, not of a validation."""
    return any(mark in metrics for mark in MARKS)


def _json_steps(text: str) -> Iterator[tuple[int, Mapping[str, float]]]:
    for line in text.splitlines():
        try:
            record = json.loads(line)
            step, data = record["step"], record["data"]
        except (ValueError, TypeError, KeyError, RecursionError):
            # The last line of a killed run, or another kind of file.
            continue
        if isinstance(step, int) and abs(step) < MOST_STEPS and isinstance(data, dict):
            yield step, {name: float(value) for name, value in data.items() if _is_figure(value)}


def _console_steps(text: str) -> Iterator[tuple[int, Mapping[str, float]]]:
    whole, _, unfinished = text.rpartition("\n")
    # The last number of a line that is cut off may lack digits.
    for line in [*whole.splitlines(), unfinished.rpartition(" - ")[0]]:
        match = CONSOLE.search(line)
        if match:
            figures = {name: float(value) for name, value in FIGURE.findall(match[2])}
            yield int(match[1]), {name: value for name, value in figures.items() if _is_figure(value)}


def _is_figure(value: object) -> bool:
    # No comparison with NaN is true.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
