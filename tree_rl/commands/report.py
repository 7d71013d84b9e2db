"""`tree-rl report`: a run as a page, or live in the terminal. Imports neither torch nor verl."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from tree_rl.commands.row_options import refuse_beside, require_page
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted_path
from tree_rl.inspection.files.run_log import read_run
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.files.writing import write_whole
from tree_rl.run_report.report import build_report, compare_rows, summary_rows
from tree_rl.run_report.terminal import run_table

SECONDS_BETWEEN_LOOKS = 2.0
Run = Annotated[Path, typer.Argument(help="A run's folder, its file logger's jsonl, or its console log.")]
Against = Annotated[Path | None, typer.Option(help="A second run, drawn dashed: rows against trees, for example.")]
Out = Annotated[Path, typer.Option(help="The page to write.")]
Watch = Annotated[
    bool, typer.Option("--watch", help="Show RUN in the terminal as it goes, and write no page. Ctrl+C ends it.")
]


def report_run(
    context: typer.Context,
    run: Run,
    against: Against = None,
    out: Out = Path("report.html"),
    watch: Watch = False,
) -> None:
    """Write a page about RUN from verl's own logs: reward, loss, overlap, times, memory, balance, drift."""
    with one_line_errors():
        if watch:
            refuse_beside(context, "--watch", "against", "out")
            watch_run(run)
            return
        require_page(out, "--out", run, against)
        runs = [read_run(path) for path in (run, against) if path is not None]
        write_whole(out, build_report(runs).encode())
        rows = [*summary_rows(runs[0]), *(compare_rows(*runs) if len(runs) > 1 else [])]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            say(f"{name:<{width}}  {value}")
        say(f"\nPage written to {quoted_path(out)}")


def watch_run(run: Path) -> None:
    """Show the latest steps of a run, refreshed until Ctrl+C."""
    try:
        with Live(latest_steps(run), auto_refresh=False) as live:
            while True:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                live.update(latest_steps(run), refresh=True)
    except KeyboardInterrupt:
        return


def latest_steps(run: Path) -> RenderableType:
    """The table of a run, or a note that there is no step yet; raises InputError if the path does not exist."""
    if not run.exists():
        raise InputError(f"{quoted_path(run)}: no such file or folder")
    try:
        return run_table(read_run(run))
    except InputError:
        return Text(f"{quoted_path(run)}: no step yet")
