"""A run in a terminal: one line per step, or a table of the latest steps above a summary."""

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tree_rl.inspection.files.run_log import RunLog
from tree_rl.run_report.report import summary_rows
from tree_rl.run_report.sections import MEMORY

SHOWN = 12
"""Number of latest steps in the table."""
COLUMNS = (
    ("reward", ("tree/session_score/mean", "critic/score/mean"), "{:z.3f}"),
    ("loss", ("actor/pg_loss", "train/loss"), "{:z.4f}"),
    ("POR", ("tree/por",), "{:z.3f}"),
    ("saved", ("tree/realised_saving",), "{:.0%}"),
    ("rollouts s", ("timing_s/gen",), "{:.1f}"),
    ("update s", ("timing_s/update_actor",), "{:.1f}"),
    ("step s", ("timing_s/step",), "{:.1f}"),
    ("GiB", MEMORY, "{:.1f}"),
    ("completed", ("tree/session/ended_completed",), "{:.0%}"),
)


def step_line(step: int, metrics: Mapping[str, float]) -> str:
    """One line with the main metrics of a step."""
    values = ((name, _value(metrics, choices, form)) for name, choices, form in COLUMNS)
    return "  ".join([f"step {step:3d}", *(f"{name} {value}" for name, value in values if value)])


def run_table(log: RunLog, more: Sequence[tuple[str, str]] = ()) -> Group:
    """The latest steps of a run, and below them its summary followed by `more`."""
    latest = list(zip(log.steps, log.metrics, strict=True))[-SHOWN:]
    columns = [column for column in COLUMNS if any(log.has(metric) for metric in column[1])]
    table = Table(title=Text(log.name), title_justify="left", box=None, pad_edge=False)
    for name in ("step", *(name for name, _, _ in columns)):
        table.add_column(name, justify="right")
    for step, metrics in latest:
        table.add_row(str(step), *(_value(metrics, choices, form) for _, choices, form in columns))
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in [*summary_rows(log), *more]:
        facts.add_row(Text(name), Text(value))
    return Group(table, Text(), facts)


def _value(metrics: Mapping[str, float], choices: Sequence[str], form: str) -> str:
    """The first metric of `choices` that the step has, formatted; empty without one."""
    return next((form.format(metrics[name]) for name in choices if name in metrics), "")
