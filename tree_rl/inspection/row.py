"""One row of a file, ready for a forest. Legend: L tokens of the row."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tree_rl.inspection.files import RowFileError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """Token ids of one root-to-leaf sequence, with its mask and where it comes from."""

    name: str
    """Name in error messages: "row 3", "row 3, call 2"."""
    group: str
    """Prompt uid or task; only rows of the same group share prefixes."""
    token_ids: np.ndarray
    """int64 [L]."""
    trained: np.ndarray | None
    """bool [L], tokens that the model sampled and that have a loss; None if the file does not say."""
    file: Path | None = None
    """Its file; None if it is not from a file, as then is `record`."""
    record: int | None = None
    """Index of its record in the file."""
    step: str | None = None
    """Training step that sampled it; None if the file has none."""
    reward: float | None = None
    """Reward of the whole row; this and the rest are None if the file has none, or nobody read them."""
    advantage: np.ndarray | None = None
    """float64 [L], NaN at tokens without one."""
    log_prob_change: np.ndarray | None = None
    """float64 [L], newer minus older log-prob, NaN at tokens without both."""
    weight_version: np.ndarray | None = None
    """float64 [L], version of the weights that sampled the token, NaN at tokens without one."""

    def __post_init__(self) -> None:
        if self.token_ids.size == 0:
            raise RowFileError(f"{self.name}: expected at least one token, received an empty row; drop it")
        if self.trained is not None and len(self.trained) != len(self.token_ids):
            raise RowFileError(
                f"{self.name}: expected a mask of {len(self.token_ids)} tokens, received {len(self.trained)}"
            )


def any_trains(rows: list[Row]) -> bool:
    """True if any token has a loss; rows without a mask count as trained."""
    return any(row.trained is None or row.trained.any() for row in rows)


def check_vocabulary(rows: list[Row], vocab_size: int) -> None:
    """Raise a RowFileError that names the first token id outside [0, vocab_size), which the model cannot embed."""
    for row in rows:
        outside = (row.token_ids < 0) | (row.token_ids >= vocab_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise RowFileError(
                f"{row.name}: expected token ids in [0, {vocab_size}), but token {at} is {row.token_ids[at]}; "
                "strip padding, or name the tokenizer or model that wrote the file"
            )
