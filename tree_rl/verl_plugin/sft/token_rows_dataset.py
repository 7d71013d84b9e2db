"""An SFT dataset with rows of token ids: parquet columns `input_ids` and `loss_mask`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.integer_lists import mark_lists, token_id_lists
from tree_rl.inspection.files.parquet import damage, read_parquet
from tree_rl.inspection.files.quoting import quoted_names, quoted_path
from tree_rl.tree import Jagged

IDS, MASK = "input_ids", "loss_mask"
IdsAndMask = tuple[np.ndarray, np.ndarray]
"""Token ids and loss mask of a row, both int64 [L]."""
INT32_MAX = 2**31 - 1
SHORTER = "drop the row, or lower data.max_length and set data.truncation=right"
"""What to do about a row that is longer than the model's positions."""


def row_for_collator(ids: np.ndarray, mask: np.ndarray) -> dict[str, torch.Tensor]:
    """A row as verl's collator takes it: input_ids, position_ids, loss_mask, all int64 [L]."""
    return {IDS: torch.from_numpy(ids), "position_ids": torch.arange(len(ids)), MASK: torch.from_numpy(mask)}


def too_long(num_tokens: int, max_positions: int | None) -> str | None:
    """Why a tree cannot take a row of so many tokens; None if it can, or if the model's positions have no limit."""
    if max_positions is None or num_tokens <= max_positions:
        return None
    return f"{num_tokens} tokens exceed the model's {max_positions} positions; {SHORTER}"


class TokenRowsDataset(Dataset):
    """Rows of token ids and masks; select it with `data.custom_cls.{path,name}`.

    One row per training sample: a conversation may have several, whose shared prefix the engine computes once.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """Read and check all rows.

        Args:
            parquet_files: one or several paths.
            tokenizer: unused, like `processor`; verl passes both.
            config: verl's `data` node: max_length, truncation (error, left, right).
            max_samples: number of rows to keep from the start; -1 keeps all.

        Raises:
            InputError: a file is no whole parquet file, lacks a column or has no rows; ids are no integers or outside
                int32 from 0 on; a mask has values other than 0 and 1; a row is empty, has a mask of another length or
                trains its first token; no token is trained. Names file, row and column.
        """
        paths = [Path(parquet_files)] if isinstance(parquet_files, str) else [Path(path) for path in parquet_files]
        self.max_length = int(config.get("max_length", 0) or 0)
        self.truncation = str(config.get("truncation", "error"))
        self.rows: list[IdsAndMask] = []
        self.row_places: list[tuple[Path, int]] = []
        """File of each row, and its number in the file."""
        tables = []
        for path in paths:
            left = max_samples - len(self.rows) if max_samples >= 0 else None
            if left == 0:
                break
            tables.append(self._read_file(path, left))
        if not self.rows:
            names = ", ".join(map(quoted_path, paths)) or "no file"
            raise RowFileError(f"{names}: expected at least one row, received none; name a file with rows")
        if not any(mask.any() for _, mask in self.rows):
            names = ", ".join(map(quoted_path, paths))
            raise RowFileError(f"{names}: expected a row with a {MASK} of 1, received zeros alone; nothing would train")
        self.dataframe = pd.concat(tables, ignore_index=True)
        """The other columns, one of which may identify the conversation."""

    def check_for_model(self, vocab_size: int, max_positions: int | None) -> None:
        """Raise a `RowFileError`, which names file and row, for an id outside [0, vocab_size) or a row longer than the
        model's positions."""
        for (path, number), (ids, _) in zip(self.row_places, self.rows, strict=True):
            if ids.max() >= vocab_size:
                at = int(np.argmax(ids >= vocab_size))
                raise RowFileError(f"{quoted_path(path)}: {_outside(number, at, ids[at], vocab_size)}")
            if (said := too_long(len(ids), max_positions)) is not None:
                raise RowFileError(f"{quoted_path(path)}: row {number}: {said}")

    def _read_file(self, path: Path, limit: int | None) -> pd.DataFrame:
        """Append at most `limit` rows of a file; return its other columns."""
        table, names = read_parquet(path)
        missing = [name for name in (IDS, MASK) if name not in names]
        if missing:
            raise RowFileError(
                f"{quoted_path(path)}: expected columns {IDS} and {MASK}, missing {missing}; "
                f"it has {quoted_names(names)}"
            )
        table = table.slice(0, limit)
        try:
            ids = token_id_lists(table.column(IDS), IDS)
            marks = mark_lists(table.column(MASK), MASK)
            _check_rows(ids, marks)
            self.rows += [
                self._cut(number, *row)
                for number, row in enumerate(zip(ids, marks.with_values(marks.values.astype(np.int64)), strict=True))
            ]
        except RowFileError as error:
            raise RowFileError(f"{quoted_path(path)}: {error}") from error
        self.row_places += [(path, number) for number in range(table.num_rows)]
        with damage(path):
            return table.drop_columns([IDS, MASK]).to_pandas()

    def _cut(self, number: int, ids: np.ndarray, mask: np.ndarray) -> IdsAndMask:
        if self.max_length and len(ids) > self.max_length:
            if self.truncation not in ("left", "right"):
                raise RowFileError(
                    f"row {number}: {len(ids)} tokens exceed data.max_length={self.max_length}; raise it or set "
                    "data.truncation to left or right"
                )
            kept = slice(-self.max_length, None) if self.truncation == "left" else slice(self.max_length)
            ids, mask = ids[kept], mask[kept]
            # The first kept token has no predecessor that could predict it.
            mask[0] = 0
        if mask[0]:
            raise RowFileError(f"row {number}: {MASK} trains its first token, which nothing predicts; set it to 0")
        return ids, mask

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return row_for_collator(*self.rows[index])


def _check_rows(ids: Jagged, marks: Jagged) -> None:
    """Refuse rows without tokens, masks with another length than their row, and ids outside int32."""
    wrong = (ids.lengths == 0) | (ids.lengths != marks.lengths)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise RowFileError(
            f"row {row}: expected a {MASK} entry for each of at least one {IDS}, received {marks.lengths[row]} for "
            f"{ids.lengths[row]}; drop the row or correct it"
        )
    outside = (ids.values < 0) | (ids.values > INT32_MAX)
    if outside.any():
        flat = int(np.argmax(outside))
        row = int(np.searchsorted(ids.offsets, flat, side="right")) - 1
        raise _outside(row, flat - int(ids.offsets[row]), ids.values[flat], INT32_MAX + 1)


def _outside(row: int, at: int, token: int, limit: int) -> RowFileError:
    return RowFileError(
        f"row {row}, column {IDS}: expected ids in [0, {limit}), received {token} at {at}; strip padding, or name the "
        "model of these ids (model.path)"
    )
