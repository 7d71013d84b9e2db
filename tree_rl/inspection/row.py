"""One row of a file as a forest takes it.

Legend: L tokens of the row.
"""

from dataclasses import dataclass

import numpy as np

from tree_rl.inspection.files import RowFileError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """Token ids of one root-to-leaf sequence and what is known about it."""

    name: str
    """Its name in error messages: "row 3", "row 3, call 2"."""
    group: str
    """Rows merge inside a group only: the prompt's uid or the task."""
    token_ids: np.ndarray
    """int64 [L]."""
    trained: np.ndarray | None
    """bool [L], tokens that the model sampled, which have a loss; None when the file does not say."""
    record: int | None = None
    """Its record in the file; None where no file holds it."""
    step: str | None = None
    """Step of the training run that drew it; None where the file has none."""

    def __post_init__(self) -> None:
        if self.token_ids.size == 0:
            raise RowFileError(f"{self.name}: expected at least one token, received an empty row; drop it")
        if self.trained is not None and len(self.trained) != len(self.token_ids):
            raise RowFileError(
                f"{self.name}: expected a mask of {len(self.token_ids)} tokens, received {len(self.trained)}"
            )


def any_trains(rows: list[Row]) -> bool:
    """Whether any token has a loss; rows that do not say count as trained."""
    return any(row.trained is None or row.trained.any() for row in rows)


def check_vocabulary(rows: list[Row], vocab_size: int) -> None:
    """Refuse ids outside [0, vocab_size), which the model cannot embed.

    Raises:
        RowFileError: names the first row, position and id that do not.
    """
    for row in rows:
        outside = (row.token_ids < 0) | (row.token_ids >= vocab_size)
        if outside.any():
            at = int(np.argmax(outside))
            raise RowFileError(
                f"{row.name}: expected token ids in [0, {vocab_size}), but token {at} is {row.token_ids[at]}; "
                "strip padding, or name the tokenizer or model that wrote the file"
            )
