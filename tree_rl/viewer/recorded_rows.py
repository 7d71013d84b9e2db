"""Rows of a file with their recorded values: rewards, advantages, log-probs, weight versions.

Legend: L tokens of a row.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.columns import read_columns
from tree_rl.inspection.files.quoting import quoted, quoted_path
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import data_files
from tree_rl.inspection.token_rows import ATTENTION, PROMPT_AND_RESPONSE

REWARDS = ("reward", "score", "rewards", "token_level_scores", "rm_scores", "reward_score")
ADVANTAGES = ("advantages", "advantage")
NEW_LOG_PROBS = ("log_probs", "old_log_probs", "rollout_log_probs")
"""Columns of log-probs, newest weights first: after the update, before it, in the rollout engine."""
VERSIONS = ("weight_versions", "weight_version", "policy_version", "model_version")
VALUES = (*REWARDS, *ADVANTAGES, *NEW_LOG_PROBS, *VERSIONS)
RESPONSES = tuple(response for _, response in PROMPT_AND_RESPONSE)
DUMP = re.compile(r"(train|val)-step(\d{6,})-\d+\.jsonl")
"""Names of files in `rollout.custom.tree_dump_dir`."""

ReadRows = Callable[[Path], list[Row]]


def read_recorded_rows(path: Path, read_rows: ReadRows) -> list[Row]:
    """Rows of a file, a folder or a pattern; of a folder with tree dumps only the dumps.

    Args:
        path: the file, folder or pattern.
        read_rows: reads the rows of a file, a folder or a pattern.

    Raises:
        InputError: as in `read_rows`; a value that is not a number, or a list as long as neither the row nor its
            response.
    """
    dumps = [file for file in data_files(path) if DUMP.fullmatch(file.name)]
    # Other files are read together: the steps of a run can lie in a file each.
    rows = chain.from_iterable(map(read_rows, dumps or [path]))
    return [row for file, of_file in groupby(rows, attrgetter("file")) for row in _with_values(file, list(of_file))]


def _with_values(path: Path, rows: list[Row]) -> list[Row]:
    file = read_columns(path, {*VALUES, *RESPONSES, ATTENTION})
    columns = {name: file.values(name) for name in file.columns}
    dump = DUMP.fullmatch(path.name)
    recorded = []
    try:
        for row in rows:
            cells = {name: column[row.record or 0] for name, column in columns.items()}
            if dump is not None:
                # In training, rows of different steps share no prefix.
                row = replace(row, group=f"{dump[1]} step {int(dump[2])} · {row.group}")
            recorded.append(_recorded(row, cells))
    except RowFileError as error:
        raise RowFileError(f"{quoted_path(path)}: {error}") from error
    return recorded


def _recorded(row: Row, cells: dict[str, Any]) -> Row:
    def of(names: tuple[str, ...]) -> list[np.ndarray]:
        present = [name for name in names if cells.get(name) is not None]
        return [_per_token(cells[name], name, row, cells) for name in present]

    log_probs, advantages, versions = of(NEW_LOG_PROBS), of(ADVANTAGES), of(VERSIONS)
    rewards = [name for name in REWARDS if cells.get(name) is not None]
    return replace(
        row,
        reward=float(_numbers(cells[rewards[0]], rewards[0], row).sum()) if rewards else None,
        advantage=_at_trained(advantages[0], row) if advantages else None,
        log_prob_change=_at_trained(log_probs[0] - log_probs[1], row) if len(log_probs) > 1 else None,
        weight_version=_at_trained(versions[0], row) if versions else None,
    )


def _numbers(cell: Any, name: str, row: Row) -> np.ndarray:
    try:
        return np.atleast_1d(np.asarray(cell, dtype=np.float64)).ravel()
    except (TypeError, ValueError) as error:
        raise RowFileError(
            f"{row.name}, column {name}: expected a number or a list of them, received {quoted(cell)}; correct or drop "
            "the column"
        ) from error


def _per_token(cell: Any, name: str, row: Row, cells: dict[str, Any]) -> np.ndarray:
    """float64 [L]: a single number at every token, or a list placed at the tokens of the row or its response."""
    values, tokens = _numbers(cell, name, row), len(row.token_ids)
    if np.ndim(cell) == 0:
        return np.full(tokens, values[0])
    seen = cells.get(ATTENTION)
    if seen is not None and len(values) <= len(seen):
        values = values[np.asarray(seen[len(seen) - len(values) :], dtype=bool)]
    response = next((cells[column] for column in RESPONSES if cells.get(column) is not None), None)
    answered = -1 if response is None else len(response)
    if response is not None and seen is not None:
        answered = int(np.count_nonzero(seen[len(seen) - len(response) :]))
    if len(values) not in (tokens, answered):
        raise RowFileError(
            f"{row.name}, column {name}: expected {tokens} numbers (row) or {max(answered, 0)} (response), received "
            f"{len(values)}; correct or drop the column"
        )
    return np.concatenate([np.full(tokens - len(values), np.nan), values])


def _at_trained(values: np.ndarray, row: Row) -> np.ndarray:
    return values if row.trained is None else np.where(row.trained, values, np.nan)
