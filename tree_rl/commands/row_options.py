"""Options that several commands share, and how they read a file of rows."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tree_rl.cost.cluster.gpus import Gpu
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted_path
from tree_rl.inspection.files.writing import require_folder_of
from tree_rl.inspection.model_shape import read_model_shape
from tree_rl.inspection.recording import Recording
from tree_rl.inspection.row_file import DATA, read_recording

MOST_GPUS = 65_536
"""Largest cluster of a prediction, which assigns rows to every GPU."""
WORDS = """
Words: *rows* are the sequences that a trainer receives. A *group* is the rows of one prompt; only they share prefixes.
*Flat* tokens are those of all rows; *unique* tokens are those of the group's trees, each prefix once. *POR* (potential
overlap ratio) is 1 - unique / flat. A *bound* is the largest possible speed-up of an update: by tokens, flat over
unique; by operations (FLOP bound), those of the rows over those of the trees, attention and head included.
"""
"""Last paragraph in the help of every command that uses these words."""

File = Annotated[
    Path,
    typer.Argument(help="A parquet, jsonl, json, arrow or traj file, a folder of them, or a pattern like 'a/*.jsonl'."),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="Folder of a Hugging Face tokenizer, or an id in the local cache; needed for messages and text."),
]
RowsOption = Annotated[RowsPer, typer.Option("--rows", help="Chat messages: one row per trajectory or per model call.")]
GroupBy = Annotated[
    str | None, typer.Option(help="Column whose equal values form a group. Default: uid, group, group_id or task_id.")
]
Model = Annotated[
    Path | None,
    typer.Option(
        help="config.json of the model, an id in the local cache, or a name such as 8b or qwen3-30b-a3b; "
        "sets FLOP bound and vocabulary size."
    ),
]
Groups = Annotated[int, typer.Option(help="Groups to list.", min=0)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
GpuOption = Annotated[Gpu, typer.Option("--gpu", help="GPU of predictions. The h200 was measured.")]
Gpus = Annotated[
    int, typer.Option(min=1, max=MOST_GPUS, help="GPUs that share weights and optimizer state (FSDP2), 8 a node.")
]
UpdateShareOption = Annotated[
    float | None,
    typer.Option(
        "--update-share",
        min=0.0,
        max=1.0,
        help="Share of a step without trees that log-probs and updates take; rollouts take the rest. Default: 0.6.",
    ),
]
Timing = Annotated[
    Path | None,
    typer.Option(help="Measure that share: verl's console log, or the jsonl of its logger file, of a run of rows."),
]


def refuse_unused(context: typer.Context, partner: str, *names: str) -> None:
    """Raise an InputError for the first of these parameters on the command line: without `partner` it does nothing."""
    for option in _given(context, *names):
        raise InputError(f"{option}: expected it together with {partner}; add that, or leave {option} out")


def refuse_beside(context: typer.Context, other: str, *names: str) -> None:
    """Raise an InputError for the first of these parameters on the command line: beside `other` it does nothing."""
    for option in _given(context, *names):
        raise InputError(f"{option}: expected it without {other}; leave one of them out")


def _given(context: typer.Context, *names: str) -> Iterator[str]:
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            yield max(parameter.opts, key=len)


def require_page(path: Path, option: str, *read: Path | None) -> None:
    """Raise an InputError if a page has no folder, or would replace one of the files `read` or a file of rows."""
    require_folder_of(path, option)
    same = any(one is not None and one.exists() and os.path.samefile(one, path) for one in read if path.is_file())
    if same or (path.is_file() and path.suffix.lower() in DATA):
        raise InputError(
            f"{option} {quoted_path(path)}: expected a place for the page, found data, which it would replace; name "
            "another place"
        )


def read_file(
    file: Path, tokenizer: Path | None, rows_per: RowsPer, group_by: str | None, model: Path | None
) -> Recording:
    """Contents of FILE; raises InputError for mistakes in it, and for token ids beyond the model's vocabulary."""
    vocab_size = None if model is None else read_model_shape(model).vocab
    return read_recording(file, tokenizer=tokenizer, rows_per=rows_per, group_by=group_by, vocab_size=vocab_size)


def typed_command(
    command: str, file: Path, tokenizer: Path | None, rows_per: RowsPer, group_by: str | None, *more: object
) -> str:
    """A command on the same rows, quoted for a shell."""
    given: list[object] = ["tree-rl", command, file]
    given += [] if tokenizer is None else ["--tokenizer", tokenizer]
    given += [] if rows_per is RowsPer.TRIAL else ["--rows", rows_per.value]
    given += [] if group_by is None else ["--group-by", group_by]
    return shlex.join(map(str, [*given, *more]))
