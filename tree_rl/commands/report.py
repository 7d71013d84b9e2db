"""`tree-rl report`: a run as a page. Imports neither torch nor verl."""

from pathlib import Path
from typing import Annotated

import typer

from tree_rl.inspection.files.run_log import read_run
from tree_rl.inspection.files.shown import shown_path
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.files.writing import write_whole
from tree_rl.run_report.report import build_report, compare_rows, summary_rows

Run = Annotated[Path, typer.Argument(help="A run's folder, its file logger's jsonl, or its console log.")]
Against = Annotated[Path | None, typer.Option(help="A second run, drawn dashed: rows against trees, for example.")]
Out = Annotated[Path, typer.Option(help="The page to write.")]


def report_run(run: Run, against: Against = None, out: Out = Path("report.html")) -> None:
    """Write a page about RUN from verl's own logs: reward, loss, overlap, times, memory, balance, drift."""
    with one_line_errors():
        runs = [read_run(path) for path in (run, against) if path is not None]
        write_whole(out, build_report(runs).encode())
        rows = [*summary_rows(runs[0]), *(compare_rows(*runs) if len(runs) > 1 else [])]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            say(f"{name:<{width}}  {value}")
        say(f"\nPage written to {shown_path(out)}")
