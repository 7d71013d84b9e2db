"""Result files: a CSV that grows row by row, repeated measurements as median and range."""

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tree_rl.inspection.files.writing import write_whole

Columns = dict[str, object]
"""A row of results by column name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    median: float
    low: float
    """The smallest."""
    high: float
    """The largest."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


def collect_rows(measured: Iterable[Columns], about: Mapping[str, object], path: Path | None) -> list[Columns]:
    """Collect rows as they are measured and write the CSV after each, so that a run that stops keeps its results.

    Every row gets the columns `about`: what ran, and where. Without a path nothing is written.
    """
    rows: list[Columns] = []
    for row in measured:
        rows.append({**row, **about})
        if path is not None:
            write_csv(path, rows)
    return rows


def print_setting(about: Mapping[str, object], say: Callable[[str], None]) -> None:
    """Print the columns that are not empty on one line."""
    say(", ".join(f"{name} {value}" for name, value in about.items() if value != ""))


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Replace a file, whole, by rows that may differ in their columns; a column that a row lacks stays empty."""
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _written(value) for name, value in row.items()})
    write_whole(path, text.getvalue().encode("utf-8"))


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _written(value: object) -> object:
    """Floats with six digits: more would be noise."""
    return f"{value:.6g}" if isinstance(value, float) else value
