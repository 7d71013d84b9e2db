"""`tree-rl top`: a running job in the terminal. Imports neither torch nor verl."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tree_rl.commands.report import Run
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.run_log import RunLog, read_run
from tree_rl.inspection.files.shown import shown_path
from tree_rl.inspection.files.terminal import one_line_errors
from tree_rl.run_report.report import summary_rows

Once = Annotated[bool, typer.Option("--once", help="Print once and end.")]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")]
SHOWN = 12
"""Latest steps in the table."""
COLUMNS = (
    ("reward", ("tree/session_score/mean", "critic/score/mean"), "{:.3f}"),
    ("loss", ("actor/pg_loss", "train/loss"), "{:.4f}"),
    ("POR", ("tree/por",), "{:.3f}"),
    ("saved", ("tree/realised_saving",), "{:.0%}"),
    ("rollouts s", ("timing_s/gen",), "{:.1f}"),
    ("update s", ("timing_s/update_actor",), "{:.1f}"),
    ("step s", ("timing_s/step",), "{:.1f}"),
    ("GiB", ("actor/perf/max_memory_allocated_gb",), "{:.1f}"),
    ("completed", ("tree/session/ended_completed",), "{:.0%}"),
)


def watch_run(run: Run, once: Once = False, every: Every = 2.0) -> None:
    """Show RUN as it goes: its latest steps, and what it has reached. Ctrl+C ends it."""
    with one_line_errors():
        console = Console()
        if once:
            console.print(frame(read_run(run)))
            return
        try:
            with Live(frame_of(run), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(every)
                    live.update(frame_of(run), refresh=True)
        except KeyboardInterrupt:
            return


def frame_of(run: Path) -> Group | Text:
    """The frame, or a word that there is no step yet. A path that does not exist raises InputError."""
    if not run.exists():
        raise InputError(f"{shown_path(run)}: no such file or folder")
    try:
        return frame(read_run(run))
    except InputError:
        return Text(f"{shown_path(run)}: no step yet")


def frame(log: RunLog) -> Group:
    """The latest steps as a table, and the summary."""
    columns = [(name, metric, form) for name, metrics, form in COLUMNS
               for metric in [next((one for one in metrics if log.has(one)), None)] if metric]  # fmt: skip
    table = Table(title=Text(log.name), title_justify="left", box=None, pad_edge=False)
    for name in ("step", *(name for name, _, _ in columns)):
        table.add_column(name, justify="right")
    for step, metrics in list(zip(log.steps, log.metrics, strict=True))[-SHOWN:]:
        values = [form.format(metrics[metric]) if metric in metrics else "" for _, metric, form in columns]
        table.add_row(str(step), *values)
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in summary_rows(log):
        facts.add_row(name, value)
    return Group(table, Text(), facts)
