"""Rows of a file of token ids, texts, chat messages or model calls."""

import os
import re
from dataclasses import replace
from glob import escape, glob
from pathlib import Path
from typing import Any

from tree_rl.inspection.chat_rows import SYSTEM_TEXT, TOOLS, RowsPer, read_chat_rows
from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import ColumnFile, read_columns
from tree_rl.inspection.files.npz import group_of_session
from tree_rl.inspection.files.quoting import quoted, quoted_names, quoted_path
from tree_rl.inspection.formats.call_log import CALL_COLUMNS, call_pair, read_calls
from tree_rl.inspection.formats.text_rows import PAIRS, SEGMENTS, TEXT_COLUMNS, read_text_rows, text_pair
from tree_rl.inspection.messages.conversation import CONVERSATIONS
from tree_rl.inspection.recording import Recording, Taken
from tree_rl.inspection.row import Row, check_vocabulary
from tree_rl.inspection.steps import STEPS, separate_steps
from tree_rl.inspection.token_rows import GROUPS, TOKEN_COLUMNS, has_token_ids, read_token_rows
from tree_rl.tree.report.counted import counted

SESSIONS = ".npz"
IDS, TEXTS, CALLS, CHATS = "token ids", "texts", "calls", "chats"
"""What the rows of a file can be."""
DATA = {".parquet", ".jsonl", ".json", ".arrow", ".traj", ".npz"}
SIGNS = re.compile(r"[*?]|\[.+\]")
"""What makes a path a pattern."""
PACKED, PACKED_DATA = {".gz", ".zst", ".bz2", ".xz"}, {".jsonl", ".parquet"}
"""Endings of packed files, and of those that hold rows; packed *.json are also profiles."""
NO_DATA = {"dataset_info.json", "state.json", "dataset_dict.json", "config.json"}
"""Files that Hugging Face writes next to the data."""


def read_row_file(path: Path, **options: Any) -> list[Row]:
    """The rows of `read_recording`, with the same options."""
    return read_recording(path, **options).rows


def read_recording(path: Path, *, group_by: str | None = None, **options: Any) -> Recording:
    """Read the rows that a trainer would receive, at least one, and the columns they came from.

    Args:
        path: a parquet, jsonl, json, arrow or traj file, a folder of such files, or a pattern like `dumps/*.jsonl`.
        tokenizer: a Hugging Face tokenizer folder; needed for chat messages.
        rows_per: what becomes a row, for chat messages.
        group_by: column whose equal values form a group. None takes the first of uid, group, group_id, task_id, and
            separates the steps of a run; without any of these columns the whole file is one group.
        vocab_size: limit on token ids. None takes the tokenizer's; without a tokenizer only negative ids are refused.

    Raises:
        InputError: names the file, row or column and what was expected.
    """
    files = data_files(path)
    named = zip(files, _names_of_groups(files), strict=True)
    whole = Recording.joined([_read_file(file, name, group_by=group_by, **options) for file, name in named])
    return whole if group_by is not None else separate_steps(whole)


def _names_of_groups(files: list[Path]) -> list[str]:
    """Group of each file whose rows name none: its stem if no other file has it, or its path in their common folder."""
    # uni-agent writes one file per session, into a folder whose name identifies the prompt.
    keys = [group_of_session(file) if file.suffix.lower() == SESSIONS else file.absolute() for file in files]
    short = [key.name if file.suffix.lower() == SESSIONS else file.stem for file, key in zip(files, keys, strict=True)]
    if len(set(short)) == len(set(keys)):
        return short
    folder = os.path.commonpath([key.parent for key in keys])
    return [str(key.relative_to(folder)) for key in keys]


def _read_file(
    path: Path,
    own_group: str,
    *,
    tokenizer: Path | None = None,
    rows_per: RowsPer = RowsPer.TRIAL,
    group_by: str | None = None,
    vocab_size: int | None = None,
) -> Recording:
    wanted = {*TOKEN_COLUMNS, *CONVERSATIONS, TOOLS, SYSTEM_TEXT, *STEPS, *TEXT_COLUMNS, *CALL_COLUMNS, *GROUPS}
    file = read_columns(path, wanted if group_by is None else {*wanted, group_by})
    if group_by is not None and group_by not in file.columns:
        names = quoted_names(file.names)
        raise RowFileError(f"{quoted_path(path)}: --group-by {quoted(group_by)}: no such column; the file has {names}")
    named = group_by or next((name for name in GROUPS if name in file.columns), None)
    values = None if named is None else file.values(named)
    groups = [own_group] * file.num_rows if values is None else [str(value) for value in values]
    try:
        content, columns = _content_of(file)
        if values is None and path.suffix.lower() == SESSIONS:
            named = "folder"
        if values is None and content == TEXTS:
            groups, named = [str(value) for value in file.values(columns[0])], f"equal {columns[0]}"
        chat = None if tokenizer is None else ChatTokenizer(tokenizer)
        rows, taken = _read_rows(file, content, columns, groups, chat, rows_per)
        known = 2**31 - 1 if chat is None else max(chat.vocabulary.get_vocab().values(), default=-1) + 1
        check_vocabulary(rows, vocab_size or known)
        if values is not None:
            _check_groups(values, str(named))
    except RowFileError as error:
        raise RowFileError(f"{quoted_path(path)}: {error}") from error
    labels = {} if named else file.labels()
    column = file.values(next((name for name in STEPS if name in file.columns), STEPS[0]))
    steps = [column[row.record or 0] for row in rows]
    return Recording(
        rows=[
            replace(row, file=path, step=None if step is None else str(step))
            for row, step in zip(rows, steps, strict=True)
        ],
        taken=(replace(taken, group=named),),
        labels={name: [str(column[row.record or 0]) for row in rows] for name, column in labels.items()},
    )


def _content_of(file: ColumnFile) -> tuple[str, tuple[str, ...]]:
    """What the rows of a file are, and the columns to read: of prompts and answers, or of conversations."""
    if has_token_ids(file.columns):
        return IDS, ()
    if calls := call_pair(file):
        return CALLS, calls
    if texts := text_pair(file.columns):
        return TEXTS, texts
    column = next((name for name in CONVERSATIONS if name in file.columns), None)
    if column is None:
        raise RowFileError(
            f"expected a column input_ids, or prompt_ids and response_ids, or prompts and responses, or chat "
            f"messages ({', '.join(CONVERSATIONS)}), or texts or calls ({', '.join(map(' and '.join, PAIRS))}); "
            f"received {quoted_names(file.names)}"
        )
    return CHATS, (column,)


def _read_rows(
    file: ColumnFile,
    content: str,
    columns: tuple[str, ...],
    groups: list[str],
    chat: ChatTokenizer | None,
    rows_per: RowsPer,
) -> tuple[list[Row], Taken]:
    """The rows, and the columns that were read; the caller fills in `Taken.group`."""
    if content == IDS:
        return read_token_rows(file.columns, groups)
    if content == TEXTS:
        rows = read_text_rows(file, columns, groups, chat)
        loss = f"all of {columns[1]}" if SEGMENTS not in file.columns else f"{SEGMENTS} that the model wrote"
    elif chat is None:
        raise RowFileError(
            "chat messages need --tokenizer, an id in the local cache or a folder "
            "(examples/write_qwen_tokenizer.py of `tree-rl recipes` makes one)"
        )
    elif content == CALLS:
        rows, left_out = read_calls(file, columns, groups, chat)
        skipped = f" ({counted(left_out, 'record')} left out: no answered call)" if left_out else ""
        loss = f"all of {columns[1]}{skipped}"
    else:
        rows = read_chat_rows(file, columns[0], groups, chat, rows_per)
        loss = "assistant turns" if rows_per is RowsPer.TRIAL else "the assistant turn of the call"
    return rows, Taken(tokens=columns, loss=loss, padding="text has none", group=None)


def data_files(path: Path) -> list[Path]:
    """The files that a path names: the file itself, those in a folder, or those that match a pattern."""
    if path.is_dir():
        found = [file for file in _shown_files(path) if _is_data(file)]
        if not found:
            raise RowFileError(
                f"{quoted_path(path)}: expected files {', '.join(sorted(DATA))} in this folder, found none"
            )
        return found
    # Signs in the name of a folder that exists stand for themselves.
    folder = next((one for one in (path, *path.parents) if one.exists()), path)
    pattern = str(path.relative_to(folder))
    if SIGNS.search(pattern):
        found = sorted(Path(file) for file in glob(os.path.join(escape(str(folder)), pattern), recursive=True))
        if not found:
            raise RowFileError(f"{quoted_path(path)}: expected files that match, found none")
        return found
    return [path]


def _shown_files(folder: Path) -> list[Path]:
    """Files in a folder and its sub-folders, linked ones too, sorted. Hidden ones are copies of Jupyter or macOS."""
    files, seen = [], set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        # Links come last: one to a folder beside or around it gives no file a second time.
        links = {name for name in folders if os.path.islink(os.path.join(place, name))}
        folders[:] = sorted((name for name in folders if name[0] != "."), key=lambda name: (name in links, name))
        files += [Path(place, name) for name in names if name[0] != "."]
    return sorted(files)


def _is_data(file: Path) -> bool:
    """True for data, packed rows too: reading refuses them by name, so that none is missing silently."""
    if file.suffix.lower() in PACKED:
        return file.with_suffix("").suffix.lower() in PACKED_DATA
    return file.suffix.lower() in DATA and not _is_about_data(file)


def _is_about_data(file: Path) -> bool:
    """True for metadata files next to the data: those of Hugging Face, and uni-agent's summary of its arrays."""
    return file.name in NO_DATA or (file.suffix == ".json" and file.with_suffix(".npz").exists())


def _check_groups(values: list[Any], column: str) -> None:
    """Refuse rows without a group: as one group they would share prefixes that training does not share."""
    for number, value in enumerate(values):
        if value is None or isinstance(value, list | dict) or value != value:
            received = "nothing" if value is None else quoted(value)
            raise RowFileError(
                f"row {number}, column {quoted(column)}: expected the row's group, a text or a number, received "
                f"{received}; fill it in, or name another column with --group-by"
            )
