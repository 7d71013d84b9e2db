"""Rows of a file, whatever it holds: token ids or chat messages."""

from pathlib import Path

from tree_rl.inspection.chat_rows import CONVERSATIONS, RowsPer, read_chat_rows
from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.columns import read_columns
from tree_rl.inspection.row import Row, RowFileError, check_vocabulary
from tree_rl.inspection.token_rows import GROUPS, has_token_ids, read_token_rows


def read_row_file(
    path: Path,
    *,
    tokenizer: Path | None = None,
    rows_per: RowsPer = RowsPer.TRIAL,
    group_by: str | None = None,
    vocab_size: int | None = None,
) -> list[Row]:
    """Read the rows that a trainer would receive, at least one.

    Args:
        path: a parquet, jsonl or json file.
        tokenizer: a Hugging Face tokenizer folder; needed for chat messages.
        rows_per: what becomes a row, for chat messages.
        group_by: column whose equal values form a group. None takes the first of uid, group, group_id, task_id;
            without any of them the whole file is one group.
        vocab_size: ids must be smaller. None takes the tokenizer's; without a tokenizer only negative ids are refused.

    Raises:
        RowFileError: names the file, row or column and what was expected.
    """
    columns = read_columns(path)
    count = len(next(iter(columns.values())))
    if group_by is not None and group_by not in columns:
        raise RowFileError(f"{path}: --group-by {group_by}: no such column; the file has {', '.join(columns)}")
    named = group_by or next((name for name in GROUPS if name in columns), None)
    groups = [path.stem] * count if named is None else [str(value) for value in columns[named]]
    chat = None if tokenizer is None else ChatTokenizer(tokenizer)
    if has_token_ids(columns):
        rows = read_token_rows(columns, groups)
    elif any(name in columns for name in CONVERSATIONS):
        if chat is None:
            raise RowFileError(f"{path}: chat messages need --tokenizer FOLDER (examples/write_qwen_tokenizer.py)")
        rows = read_chat_rows(columns, groups, tokenizer=chat, rows_per=rows_per)
    else:
        raise RowFileError(
            f"{path}: expected a column input_ids, or prompt_ids and response_ids, or prompts and responses, or chat "
            f"messages ({', '.join(CONVERSATIONS)}); received {', '.join(columns)}"
        )
    known = 2**31 - 1 if chat is None else int(chat.vocabulary.get_vocab_size(with_added_tokens=True))
    check_vocabulary(rows, vocab_size or known)
    return rows
