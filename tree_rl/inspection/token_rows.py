"""Rows from columns of token ids: whole rows, or a prompt and a response."""

from typing import Any

import numpy as np

from tree_rl.inspection.columns import Columns
from tree_rl.inspection.row import Row, RowFileError

WHOLE = "input_ids"
PROMPT_AND_RESPONSE = (("prompt_ids", "response_ids"), ("prompts", "responses"))
MASKS = ("response_mask", "loss_mask")
GROUPS = ("uid", "group", "group_id", "task_id")


def has_token_ids(columns: Columns) -> bool:
    """Whether the columns hold token ids, under any of the names that this module reads."""
    return WHOLE in columns or any(set(pair) <= set(columns) for pair in PROMPT_AND_RESPONSE)


def read_token_rows(columns: Columns, groups: list[str]) -> list[Row]:
    """One row per row of a file of token ids.

    Args:
        columns: `input_ids`, or `prompt_ids` and `response_ids`, or verl's `prompts` and `responses`; optionally
            `response_mask` or `loss_mask`, as long as the row or its response. Without a mask a response counts as
            sampled.
        groups: group of each row.

    Raises:
        RowFileError: a missing or non-integer value, an empty row, a mask of another length.
    """
    pair = next((pair for pair in PROMPT_AND_RESPONSE if set(pair) <= set(columns)), None)
    mask = next((name for name in MASKS if name in columns), None)
    rows = []
    for number, group in enumerate(groups):
        parts = [integer_array(columns[name][number], number, name) for name in pair or (WHOLE,)]
        ids = np.concatenate(parts)
        prompt = parts[0] if pair else ids[:0]
        trained = None if pair is None else np.arange(len(ids)) >= len(prompt)
        if mask is not None:
            marks = integer_array(columns[mask][number], number, mask)
            trained = _row_mask(marks, len(ids), len(prompt), f"row {number}, column {mask}")
        rows.append(Row(name=f"row {number}", group=group, token_ids=ids, trained=trained))
    return rows


def integer_array(value: Any, number: int, column: str) -> np.ndarray:
    """One cell as int64 [L]; the error for what is absent, nested or not integer names row and column."""
    if value is None:
        raise RowFileError(f"row {number}, column {column}: expected a list of integers, received nothing")
    array = np.asarray(value)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise RowFileError(
            f"row {number}, column {column}: expected a list of integers, received {str(value)[:60]}"
            + (" (text: use --tokenizer and a column of messages)" if isinstance(value, str) else "")
        )
    return array.astype(np.int64)


def _row_mask(marks: np.ndarray, tokens: int, prompt_tokens: int, where: str) -> np.ndarray:
    if len(marks) == tokens:
        return marks != 0
    if len(marks) == tokens - prompt_tokens:
        return np.concatenate([np.zeros(prompt_tokens, dtype=bool), marks != 0])
    raise RowFileError(
        f"{where}: expected {tokens} entries (row) or {tokens - prompt_tokens} (response), received {len(marks)}"
    )
