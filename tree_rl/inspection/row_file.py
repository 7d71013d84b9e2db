"""Rows of a file, whatever it holds: token ids or chat messages."""

from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from tree_rl.inspection.chat_rows import CONVERSATIONS, TOOLS, RowsPer, read_chat_rows
from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import ColumnFile, read_columns
from tree_rl.inspection.files.shown import shown, shown_names, shown_path
from tree_rl.inspection.recording import Recording, Taken
from tree_rl.inspection.row import Row, check_vocabulary
from tree_rl.inspection.token_rows import GROUPS, TOKEN_COLUMNS, has_token_ids, read_token_rows, taken_tokens

TEXTS = ("input", "output")
NO_PADDING = "text has none"
DATA = {".parquet", ".jsonl", ".json", ".arrow", ".traj"}
NO_DATA = {"dataset_info.json", "state.json", "dataset_dict.json", "config.json"}
"""What Hugging Face writes beside the data."""


def read_row_file(path: Path, **options: Any) -> list[Row]:
    """The rows of `read_recording`, which takes the same options."""
    return read_recording(path, **options).rows


def read_recording(
    path: Path,
    *,
    tokenizer: Path | None = None,
    rows_per: RowsPer = RowsPer.TRIAL,
    group_by: str | None = None,
    vocab_size: int | None = None,
) -> Recording:
    """Read the rows that a trainer would receive, at least one, and say which columns they came from.

    Args:
        path: a parquet, jsonl, json, arrow or traj file, a folder of such files, or a pattern like `dumps/*.jsonl`.
        tokenizer: a Hugging Face tokenizer folder; needed for chat messages.
        rows_per: what becomes a row, for chat messages.
        group_by: column whose equal values form a group. None takes the first of uid, group, group_id, task_id;
            without any of them the whole file is one group.
        vocab_size: ids must be smaller. None takes the tokenizer's; without a tokenizer only negative ids are refused.

    Raises:
        InputError: names the file, row or column and what was expected.
    """
    files = _files(path)
    if files != [path]:
        read = partial(read_recording, tokenizer=tokenizer, rows_per=rows_per, group_by=group_by, vocab_size=vocab_size)
        return Recording.joined([read(file) for file in files])
    wanted = {*TOKEN_COLUMNS, *CONVERSATIONS, TOOLS, *TEXTS, *GROUPS}
    file = read_columns(path, wanted if group_by is None else {*wanted, group_by})
    if group_by is not None and group_by not in file.columns:
        names = shown_names(file.names)
        raise RowFileError(f"{shown_path(path)}: --group-by {shown(group_by)}: no such column; the file has {names}")
    named = group_by or next((name for name in GROUPS if name in file.columns), None)
    values = None if named is None else file.values(named)
    groups = [path.stem] * file.num_rows if values is None else [str(value) for value in values]
    if values is None and _has_texts(file):
        groups, named = [str(value) for value in file.values(TEXTS[0])], TEXTS[0]
    chat = None if tokenizer is None else ChatTokenizer(tokenizer)
    try:
        rows = _read_rows(file, groups, chat, rows_per)
        known = 2**31 - 1 if chat is None else int(chat.vocabulary.get_vocab_size(with_added_tokens=True))
        check_vocabulary(rows, vocab_size or known)
        if values is not None:
            _check_groups(values, str(named))
    except RowFileError as error:
        raise RowFileError(f"{shown_path(path)}: {error}") from error
    labels = {} if named else file.labels()
    return Recording(
        rows=rows,
        taken=(_taken(file, named, rows_per),),
        labels={name: [str(column[row.record or 0]) for row in rows] for name, column in labels.items()},
    )


def _has_texts(file: ColumnFile) -> bool:
    return set(TEXTS) <= set(file.columns) and not has_token_ids(file.columns)


def _taken(file: ColumnFile, group: str | None, rows_per: RowsPer) -> Taken:
    if has_token_ids(file.columns):
        return taken_tokens(file.columns, group)
    if _has_texts(file):
        return Taken(tokens=TEXTS, loss=f"all of {TEXTS[1]}", padding=NO_PADDING, group=group)
    column = next(name for name in CONVERSATIONS if name in file.columns)
    loss = "assistant turns" if rows_per is RowsPer.TRIAL else "the assistant turn of the call"
    return Taken(tokens=(column,), loss=loss, padding=NO_PADDING, group=group)


def _read_rows(file: ColumnFile, groups: list[str], chat: ChatTokenizer | None, rows_per: RowsPer) -> list[Row]:
    if has_token_ids(file.columns):
        return read_token_rows(file.columns, groups)
    if _has_texts(file):
        return _read_texts(file, groups, chat)
    column = next((name for name in CONVERSATIONS if name in file.columns), None)
    if column is None:
        raise RowFileError(
            f"expected a column input_ids, or prompt_ids and response_ids, or prompts and responses, or chat "
            f"messages ({', '.join(CONVERSATIONS)}); received {shown_names(file.names)}"
        )
    if chat is None:
        raise RowFileError("chat messages need --tokenizer FOLDER (examples/write_qwen_tokenizer.py)")
    tools = file.values(TOOLS) if TOOLS in file.columns else [None] * file.num_rows
    return read_chat_rows(column, file.values(column), tools, groups, tokenizer=chat, rows_per=rows_per)


def _read_texts(file: ColumnFile, groups: list[str], chat: ChatTokenizer | None) -> list[Row]:
    """Prompt and answer as text, as verl's `trainer.rollout_data_dir` writes them."""
    if chat is None:
        raise RowFileError("text needs --tokenizer FOLDER, that of the run's model")
    rows = []
    for number, pair in enumerate(zip(*map(file.values, TEXTS), strict=True)):
        if not all(isinstance(text, str) for text in pair):
            raise RowFileError(
                f"row {number}: expected text in the columns {' and '.join(TEXTS)}, received {shown(pair)}"
            )
        prompt, answer = (chat.encode(text).ids for text in pair)
        ids = np.concatenate([prompt, answer])
        if not len(ids):
            raise RowFileError(f"row {number}: expected a token, found none; drop the row")
        trained = np.arange(len(ids)) >= len(prompt)
        rows.append(Row(name=f"row {number}", group=groups[number], token_ids=ids, trained=trained, record=number))
    return rows


def _files(path: Path) -> list[Path]:
    """The files that a path names: itself, those of a folder, those that match a pattern."""
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in DATA and file.name not in NO_DATA)
        if not found:
            raise RowFileError(
                f"{shown_path(path)}: expected files {', '.join(sorted(DATA))} in this folder, found none"
            )
        return found
    if not path.exists() and any(sign in str(path) for sign in "*?"):
        found = sorted(Path(file) for file in glob(str(path), recursive=True))
        if not found:
            raise RowFileError(f"{shown_path(path)}: expected files that match, found none")
        return found
    return [path]


def _check_groups(values: list[Any], column: str) -> None:
    """Refuse rows without a group: taken as one group they would share prefixes that training does not share."""
    for number, value in enumerate(values):
        if value is None or isinstance(value, list | dict) or value != value:
            received = "nothing" if value is None else shown(value)
            raise RowFileError(
                f"row {number}, column {shown(column)}: expected the row's group, a text or a number, received "
                f"{received}; fill it in, or name another column with --group-by"
            )
