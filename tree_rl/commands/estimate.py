"""`tree-rl estimate`: seconds, memory and money of an update with trees and without. Imports neither torch nor verl."""

from pathlib import Path
from typing import Annotated

import typer

from tree_rl.commands.row_options import (
    File,
    GpuOption,
    Gpus,
    GroupBy,
    Json,
    RowsOption,
    Timing,
    Tokenizer,
    UpdateShareOption,
    read_rows,
    typed_command,
)
from tree_rl.cost.cluster.gpus import Gpu
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.files.shown import shown_path
from tree_rl.inspection.files.terminal import fail, one_line_errors, say
from tree_rl.inspection.row import any_trains
from tree_rl.inspection.scale.options import MOST_GPUS
from tree_rl.inspection.verdict.as_json import estimated
from tree_rl.inspection.verdict.prediction import predict_memory, predict_update
from tree_rl.inspection.verdict.text import format_estimate
from tree_rl.inspection.verdict.update_share import chosen_share

ModelToTrain = Annotated[
    Path, typer.Option("--model", help="config.json of the model, its folder, or an id in the local cache.")
]
Price = Annotated[
    float | None, typer.Option("--gpu-price", min=0.0, max=1e6, help="What a GPU costs an hour, in your money.")
]


def estimate_file(
    file: File,
    model: ModelToTrain,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    gpu: GpuOption = Gpu.H200,
    gpus: Gpus = 8,
    gpu_price: Price = None,
    update_share: UpdateShareOption = None,
    timing: Timing = None,
    as_json: Json = False,
) -> None:
    """Predict what a training step over the rows in FILE takes on your GPUs: seconds, memory, money.

    Figures are those of the cost model of `plan --ranks`; nothing is run, and no GPU is needed.
    """
    with one_line_errors():
        share = chosen_share(update_share, timing)
        rows = read_rows(file, tokenizer, rows_per, group_by, model)
        if not any_trains(rows):
            fail(f"{shown_path(file)}: expected a token that trains, found none; no update is to be predicted")
        memory = predict_memory(rows, model, gpu, gpus)
        update = predict_update(rows, model, memory, share, gpu_price)
        more = ("--model", model, "--max-tokens", memory.max_tokens, "--ranks", gpus) if memory.max_tokens else ()
        again = ("--model", model, "--gpu", gpu.value, "--gpus", min(2 * gpus, MOST_GPUS))
        command = typed_command("plan" if more else "estimate", file, tokenizer, rows_per, group_by, *(more or again))
        say(estimated(memory, update, command) if as_json else f"{format_estimate(memory, update)}\nNext: {command}")
