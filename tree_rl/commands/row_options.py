"""How the commands name a file of rows, and read it."""

from pathlib import Path
from typing import Annotated

import typer

from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.model_shape import read_model_shape
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_row_file

File = Annotated[Path, typer.Argument(help="A parquet, jsonl or json file with token ids or chat messages.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Hugging Face tokenizer folder; needed for chat messages.")]
RowsOption = Annotated[RowsPer, typer.Option("--rows", help="Chat messages: one row per trajectory or per model call.")]
GroupBy = Annotated[str | None, typer.Option(help="Column of the group. Default: uid, group, group_id or task_id.")]
Model = Annotated[Path | None, typer.Option(help="config.json of the model; sets FLOP bound and vocabulary size.")]
Groups = Annotated[int, typer.Option(help="Groups to list.", min=0)]


def read_rows(
    file: Path, tokenizer: Path | None, rows_per: RowsPer, group_by: str | None, model: Path | None
) -> list[Row]:
    """Rows of FILE; token ids beyond the model's vocabulary and mistakes in the file raise InputError."""
    vocab_size = None if model is None else read_model_shape(model).vocab
    return read_row_file(file, tokenizer=tokenizer, rows_per=rows_per, group_by=group_by, vocab_size=vocab_size)
