"""An SFT dataset of rows of token ids: parquet columns `input_ids` and `loss_mask`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset


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
            parquet_files: one path or several.
            tokenizer: unused, as `processor`; verl passes both.
            config: verl's `data` node: max_length, truncation (error, left, right).
            max_samples: rows to keep from the start; -1 keeps all.

        Raises:
            ValueError: a row is empty, has a mask of another length or trains its first token; names row and column.
        """
        paths = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        table = pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)
        self.dataframe = table if max_samples < 0 else table.head(max_samples)
        missing = {"input_ids", "loss_mask"} - set(self.dataframe.columns)
        if missing:
            raise ValueError(f"{paths}: expected columns input_ids and loss_mask, missing {sorted(missing)}")
        self.max_length = int(config.get("max_length", 0) or 0)
        self.truncation = str(config.get("truncation", "error"))
        self.rows = [
            self._read(index, np.asarray(ids), np.asarray(mask))
            for index, (ids, mask) in enumerate(
                zip(self.dataframe["input_ids"], self.dataframe["loss_mask"], strict=True)
            )
        ]

    def _read(self, index: int, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if ids.size == 0 or ids.shape != mask.shape:
            raise ValueError(
                f"row {index}: expected a loss_mask entry for each of at least one input_ids, received "
                f"{mask.size} for {ids.size}"
            )
        if self.max_length and len(ids) > self.max_length:
            if self.truncation == "error":
                raise ValueError(
                    f"row {index}: {len(ids)} tokens exceed data.max_length={self.max_length}; raise it or set "
                    "data.truncation to left or right"
                )
            kept = slice(-self.max_length, None) if self.truncation == "left" else slice(self.max_length)
            ids, mask = ids[kept], mask[kept].copy()
            # The first kept token has no predecessor that could predict it.
            mask[0] = 0
        if mask[0]:
            raise ValueError(f"row {index}: loss_mask trains its first token, which nothing predicts; set it to 0")
        return ids.astype(np.int64), mask.astype(np.int64)

    def __len__(self) -> int:
        """Rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One row as verl's collator wants it: input_ids, position_ids, loss_mask, all int64 [L]."""
        ids, mask = self.rows[index]
        return {
            "input_ids": torch.from_numpy(ids),
            "position_ids": torch.arange(len(ids)),
            "loss_mask": torch.from_numpy(mask),
        }
