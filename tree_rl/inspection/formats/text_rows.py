"""Rows from a prompt and an answer as text.

verl writes them with `trainer.rollout_data_dir` (input, output), TRL with `log_completions` (prompt, completion), AReaL
into its rollout folder (prompt, completion, and segments if the model generated several times).
"""

from typing import Any

import numpy as np

from tree_rl.inspection.chat_tokenizer import ChatTokenizer
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import ColumnFile, Columns
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.row import Row

PAIRS = (("input", "output"), ("prompt", "completion"))
SEGMENTS = "segments"
GENERATED = "gen"
"""Role of the segments that the model wrote, as AReaL names it."""

TEXT_COLUMNS = {name for pair in PAIRS for name in pair} | {SEGMENTS}
"""All columns that `read_text_rows` reads."""


def text_pair(columns: Columns) -> tuple[str, str] | None:
    """The columns of prompt and answer, if there are any."""
    return next((pair for pair in PAIRS if set(pair) <= set(columns)), None)


def read_text_rows(
    file: ColumnFile, pair: tuple[str, ...], groups: list[str], tokenizer: ChatTokenizer | None
) -> list[Row]:
    """One row per record; the answer is trained, or the segments marked as generated. `pair` is from `text_pair`."""
    if tokenizer is None:
        raise RowFileError("text needs --tokenizer, a folder or an id in the local cache: that of the run's model")
    prompts, answers, segments = map(file.values, (*pair, SEGMENTS))
    rows = []
    for number, (prompt, answer, parts) in enumerate(zip(prompts, answers, segments, strict=True)):
        if not (isinstance(prompt, str) and isinstance(answer, str)):
            raise RowFileError(
                f"row {number}: expected text in the columns {' and '.join(pair)}, received {quoted((prompt, answer))}"
            )
        pieces = [(prompt, False), (answer, True)] if parts is None else _segments(parts, number)
        ids = [tokenizer.encode(text).ids for text, _ in pieces]
        sampled = [np.full(len(piece), is_sampled) for piece, (_, is_sampled) in zip(ids, pieces, strict=True)]
        if not any(map(len, ids)):
            raise RowFileError(f"row {number}: expected a token, found none; drop the row")
        rows.append(
            Row(
                name=f"row {number}",
                group=groups[number],
                token_ids=np.concatenate(ids),
                trained=np.concatenate(sampled),
                record=number,
            )
        )
    return rows


def _segments(parts: Any, number: int) -> list[tuple[str, bool]]:
    """(text, True if the model wrote it) of each segment."""
    if isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts):
        found = [(part.get("text"), part.get("role") == GENERATED) for part in parts]
        if all(isinstance(text, str) for text, _ in found):
            return [(str(text), is_sampled) for text, is_sampled in found]
    raise RowFileError(
        f"row {number}, column {SEGMENTS}: expected a list of objects with a role and a text, received {quoted(parts)}"
        "; drop the column or correct it"
    )
