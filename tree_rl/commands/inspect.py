"""`tree-rl inspect`: trees, overlap and bounds of a file of rows. Imports neither torch nor verl."""

from pathlib import Path
from typing import Annotated

import typer

from tree_rl.commands.row_options import File, GroupBy, Groups, Model, RowsOption, Tokenizer, read_rows
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.drawing import Picture, draw_group
from tree_rl.inspection.files.shown import shown_path
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.files.writing import write_whole
from tree_rl.inspection.model_shape import QWEN2_5_7B, read_model_shape
from tree_rl.inspection.report import report_groups, total_of
from tree_rl.inspection.text import format_report

Draw = Annotated[
    tuple[Picture, Path] | None, typer.Option(help="Draw one group: svg FILE or text FILE; - prints to the terminal.")
]
DrawGroup = Annotated[
    str | None, typer.Option("--draw-group", help="Group to draw. Default: the one with the most tokens.")
]


def inspect_file(
    file: File,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    model: Model = None,
    groups: Groups = 20,
    draw: Draw = None,
    draw_group_named: DrawGroup = None,
) -> None:
    """Show trees, overlap, bounds on the speed-up and causes of branching of the rows in FILE."""
    with one_line_errors():
        shape = QWEN2_5_7B if model is None else read_model_shape(model)
        rows = read_rows(file, tokenizer, rows_per, group_by, model)
        reports = report_groups(rows)
        say(format_report(reports, total_of(reports), shape, at_most=groups))
        assumed = "Qwen2.5-7B; --model names another" if model is None else shown_path(model)
        say(f"\nFLOP bound: flat over tree operations, attention and head included ({assumed}).")
        if draw is not None:
            picture = draw_group(rows, draw_group_named, draw[0], tokenizer)
            _write(picture, draw[1])


def _write(picture: str, target: Path) -> None:
    if str(target) in ("-", "/dev/stdout"):
        say("\n" + picture)
        return
    write_whole(target, (picture + "\n").encode("utf-8"))
    say(f"Drawing written to {shown_path(target)}")
