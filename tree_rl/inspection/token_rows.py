"""Rows from columns of token ids: whole rows, or a prompt and a response."""

from itertools import chain

import numpy as np

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import Columns
from tree_rl.inspection.files.integer_lists import mark_lists, token_id_lists
from tree_rl.inspection.recording import Taken
from tree_rl.inspection.row import Row

WHOLE = "input_ids"
PROMPT_AND_RESPONSE = (("prompt_ids", "response_ids"), ("prompts", "responses"))
MASKS = ("response_mask", "loss_mask")
ATTENTION = "attention_mask"
GROUPS = ("uid", "group", "group_id", "task_id")

TOKEN_COLUMNS = {WHOLE, *chain(*PROMPT_AND_RESPONSE), *MASKS, ATTENTION}
"""All columns that `read_token_rows` reads."""


def has_token_ids(columns: Columns) -> bool:
    """True if there are columns of token ids."""
    return WHOLE in columns or _pair(columns) is not None


def read_token_rows(columns: Columns, groups: list[str]) -> tuple[list[Row], Taken]:
    """One row per row of a file of token ids, and the columns that were read; the caller fills in `Taken.group`.

    Args:
        columns: `input_ids`, or `prompt_ids` and `response_ids`, or verl's `prompts` and `responses`; optionally
            `response_mask` or `loss_mask`, as long as the row or its response. Without a mask a response counts as
            sampled. Tokens at which `attention_mask` (as long as the row) is 0 are padding and are dropped.
        groups: group of each row.

    Raises:
        RowFileError: a missing or non-integer value, an empty row, a mask of the wrong length or with entries other
            than 0 and 1.
    """
    pair = _pair(columns)
    mask = next((name for name in MASKS if name in columns), None)
    parts = [token_id_lists(columns[name], name) for name in pair or (WHOLE,)]
    marks = None if mask is None else mark_lists(columns[mask], mask)
    seen = None if ATTENTION not in columns else mark_lists(columns[ATTENTION], ATTENTION)
    rows = []
    for number, group in enumerate(groups):
        ids = np.concatenate([part[number] for part in parts]) if pair else parts[0][number]
        prompt_tokens = len(parts[0][number]) if pair else 0
        trained = None if pair is None else np.arange(len(ids)) >= prompt_tokens
        if marks is not None:
            trained = _row_mask(marks[number], len(ids), prompt_tokens, f"row {number}, column {mask}")
        if seen is not None:
            kept = _attention(seen[number], len(ids), f"row {number}, column {ATTENTION}")
            ids, trained = ids[kept], trained if trained is None else trained[kept]
        rows.append(Row(name=f"row {number}", group=group, token_ids=ids, trained=trained, record=number))
    loss = f"all of {pair[1]}" if pair and mask is None else mask
    return rows, Taken(tokens=pair or (WHOLE,), loss=loss, padding=None if seen is None else ATTENTION, group=None)


def _pair(columns: Columns) -> tuple[str, str] | None:
    return next((pair for pair in PROMPT_AND_RESPONSE if set(pair) <= set(columns)), None)


def _row_mask(marks: np.ndarray, tokens: int, prompt_tokens: int, where: str) -> np.ndarray:
    if len(marks) == tokens:
        return marks
    if len(marks) == tokens - prompt_tokens:
        return np.concatenate([np.zeros(prompt_tokens, dtype=bool), marks])
    raise RowFileError(
        f"{where}: expected {tokens} entries (row) or {tokens - prompt_tokens} (response), received {len(marks)}"
    )


def _attention(seen: np.ndarray, tokens: int, where: str) -> np.ndarray:
    if len(seen) != tokens:
        raise RowFileError(
            f"{where}: expected {tokens} entries, one a token, received {len(seen)}; drop the column or correct it"
        )
    if not seen.any():
        raise RowFileError(f"{where}: expected a token that is no padding, found none; drop the row")
    return seen
