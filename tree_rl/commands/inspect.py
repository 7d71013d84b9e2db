"""`tree-rl inspect`: trees, overlap, bounds, predictions and a verdict on rows. Imports neither torch nor verl."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tree_rl.commands.row_options import (
    MOST_GPUS,
    File,
    GpuOption,
    Gpus,
    GroupBy,
    Groups,
    Json,
    Model,
    RowsOption,
    Timing,
    Tokenizer,
    UpdateShareOption,
    read_file,
    refuse_unused,
    require_page,
    typed_command,
)
from tree_rl.cost.cluster.gpus import Gpu
from tree_rl.inspection.appended_rows import append_rows
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.drawing import Picture, draw_group
from tree_rl.inspection.files.quoting import quoted_path
from tree_rl.inspection.files.terminal import fail, one_line_errors, say
from tree_rl.inspection.files.writing import write_whole
from tree_rl.inspection.model_shape import QWEN2_5_7B, read_model_shape
from tree_rl.inspection.overlap_by_group import GroupReport, report_groups, total_of
from tree_rl.inspection.row import any_trains
from tree_rl.inspection.text import format_report
from tree_rl.inspection.verdict.as_json import inspected
from tree_rl.inspection.verdict.grouping import regroup
from tree_rl.inspection.verdict.judgement import DENSE, EXPERTS, Verdict
from tree_rl.inspection.verdict.prediction import MemoryPrediction, predict_memory, predict_update
from tree_rl.inspection.verdict.text import format_missing_group, format_prediction, format_verdict
from tree_rl.inspection.verdict.update_share import chosen_share

Draw = Annotated[
    tuple[Picture, Path] | None, typer.Option(help="Draw one group: svg FILE or text FILE; - prints to the terminal.")
]
Price = Annotated[
    float | None,
    typer.Option("--gpu-price", min=0.0, max=1e6, help="With --model: what a GPU costs an hour, in your money."),
]
DrawGroup = Annotated[
    str | None, typer.Option("--draw-group", help="Group to draw. Default: the one with the most tokens.")
]

DrawWidth = Annotated[int, typer.Option("--draw-width", min=200, help="Width of a drawn svg, in pixels.")]


def inspect_file(
    context: typer.Context,
    file: File,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    model: Model = None,
    groups: Groups = 20,
    update_share: UpdateShareOption = None,
    timing: Timing = None,
    gpu: GpuOption = Gpu.H200,
    gpus: Gpus = 8,
    gpu_price: Price = None,
    as_json: Json = False,
    draw: Draw = None,
    draw_group_named: DrawGroup = None,
    draw_width: DrawWidth = 960,
) -> None:
    """Show what trees would save on the rows in FILE: overlap, bounds, causes of branching, and a verdict.

    With --model: what a training step over the rows takes on --gpus of the kind --gpu, in seconds, memory and money.
    These figures are those of the cost model of `plan --ranks`; nothing is run, and no GPU is needed.
    """
    with one_line_errors():
        if as_json and draw is not None and _prints(draw[1]):
            fail("--json and --draw: expected a file for the drawing, received standard output; name one")
        if draw is not None:
            require_page(draw[1], "--draw", file, timing)
        if model is None:
            refuse_unused(context, "--model", "gpu", "gpus", "gpu_price")
        if draw is None:
            refuse_unused(context, "--draw", "draw_group_named", "draw_width")
        share = chosen_share(update_share, timing)
        shape = QWEN2_5_7B if model is None else read_model_shape(model)
        recording = read_file(file, tokenizer, rows_per, group_by, model)
        reports = report_groups(recording.rows)
        total = total_of(reports)
        rows = append_rows(recording.rows)
        merged = replace(total_of(report_groups(rows)), name="merged") if len(rows) < len(recording.rows) else total
        regrouped = () if recording.has_groups else tuple(regroup(recording))
        column = group_by or (regrouped[0].column if regrouped else None)
        memory, update = None, None
        if model is not None:
            memory = predict_memory(rows, model, gpu, gpus)
            update = predict_update(rows, model, memory, share, gpu_price) if any_trains(rows) else None
        command, more = _next(reports, model, memory)
        verdict = Verdict(
            rows=len(recording.rows),
            prefix_rows=len(recording.rows) - len(rows),
            token_bound=merged.overlap.token_bound,
            flop_bound=shape.flop_bound(merged.overlap),
            reached=EXPERTS if shape.active_experts else DENSE,
            share=share,
            recording=recording,
            regrouped=regrouped,
            memory=memory,
            update_prediction=update,
            next_command=typed_command("inspect", file, tokenizer, rows_per, column)
            if regrouped
            else typed_command(command, file, tokenizer, rows_per, group_by, *more),
        )
        if as_json:
            say(inspected(reports, total, merged, shape, verdict))
        else:
            if not recording.has_groups:
                say(format_missing_group(verdict) + "\n")
            say(format_report(reports, total, merged, shape, at_most=groups))
            if memory is not None:
                say("\n" + format_prediction(memory, update))
        if draw is not None:
            picture = draw_group(recording.rows, draw_group_named, draw[0], tokenizer, draw_width)
            _write(picture, draw[1], quiet=as_json)
        if not as_json:
            assumed = "Qwen2.5-7B; --model names another" if model is None else quoted_path(model)
            say("\n" + format_verdict(verdict, merged, assumed))


def _next(
    reports: list[GroupReport], model: Path | None, memory: MemoryPrediction | None
) -> tuple[str, tuple[object, ...]]:
    """The command to type next: a plan within the budget that fits, or more GPUs if nothing fits."""
    if memory is None:
        # The smallest budget within which every group runs whole.
        return "plan", ("--max-tokens", max(report.overlap.unique_tokens for report in reports))
    if memory.max_tokens is None:
        more = min(2 * memory.gpus, MOST_GPUS)
        return "inspect", ("--model", model, "--gpu", memory.gpu.value, "--gpus", more)
    return "plan", ("--model", model, "--max-tokens", memory.max_tokens, "--ranks", memory.gpus)


def _prints(target: Path) -> bool:
    return str(target) in ("-", "/dev/stdout")


def _write(picture: str, target: Path, *, quiet: bool) -> None:
    if _prints(target):
        say("\n" + picture)
        return
    write_whole(target, (picture + "\n").encode("utf-8"))
    if not quiet:
        say(f"Drawing written to {quoted_path(target)}")
