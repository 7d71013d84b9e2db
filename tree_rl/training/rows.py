"""The token rows of one step, in host memory, and which of them may share prefixes.

Legend: B rows, F flat tokens of all rows, L decoder layers, K experts per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tree_rl.models.routers.merge_routes import number_routes
from tree_rl.training.row_images import RowImages, number_columns
from tree_rl.tree.forest import Jagged, RowError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Token rows, which positions the loss reads, and which rows may share prefixes."""

    token_ids_F: np.ndarray
    """int64 [F]."""
    offsets: np.ndarray
    """int64 [B + 1], row boundaries."""
    wanted_F: np.ndarray
    """bool [F], positions whose next token is trained (or whose outputs are asked for)."""
    counted_F: np.ndarray
    """bool [F], positions whose next token counts in the loss: `wanted_F` without those the trainer rejected."""
    temperature_B: np.ndarray
    """float32 [B], sampling temperature."""
    group_B: np.ndarray
    """int64 [B], group of each row (the prompt it answers); rows of different groups merge only with `scope: rank`."""
    label_B: tuple[str, ...]
    """Name of each row in messages."""
    weight_F: np.ndarray | None = None
    """float64 [F], weight by `path_weighting` of each token that counts in the loss, 0 elsewhere. It is at the token
    itself; `wanted_F` and `counted_F` mark the position before. Computed over whole groups, parts of which may be on
    other ranks. None: computed over these rows (`session`: a group is a session)."""
    routes_FLK: np.ndarray | None = None
    """int16 [F, L, K], experts that each token must visit, NATIVE where its router chooses; None: routers choose."""
    images: RowImages | None = None
    """Images of the rows; None if all rows are text."""
    candidates_FK: np.ndarray | None = None
    """int [F, K], token ids whose log-probs the loss reads at each wanted position besides the next token's, such as
    a teacher's likeliest; None: it reads none."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int] | np.ndarray],
        *,
        trained: Sequence[Sequence[int] | np.ndarray] | None = None,
        groups: Sequence[int] | None = None,
        temperature: float = 1.0,
        weights: Sequence[float | Sequence[float] | np.ndarray] | None = None,
        images: RowImages | None = None,
    ) -> "Rows":
        """Rows from lists of token ids.

        Args:
            token_ids: B rows of at least one token.
            trained: per row one entry per token, nonzero where the loss reads the token's log-prob; 0 at the first
                token, which has no log-prob. None trains all tokens but the first.
            groups: B numbers; rows share prefixes only within a group. None: all rows are one group.
            temperature: divides the logits.
            weights: for `path_weighting: custom`, a finite number of at least 0 per row, or one for each of its tokens.
            images: from `RowImages.of` for the same rows; None if all rows are text.

        Raises:
            RowError: an empty row, a mask or weights that do not fit it, or a trained first token; names the row.
            ValueError: a temperature that is not a finite number above 0.
        """
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature={temperature}: expected a finite number above 0, which divides the logits")
        ids = Jagged.from_rows([np.asarray(row, dtype=np.int64) for row in token_ids], dtype=np.int64)
        empty = np.flatnonzero(ids.lengths == 0)
        if len(empty):
            raise RowError(f"row {empty[0]}: has no tokens; drop it before training")
        wanted_F = np.ones(len(ids.values), dtype=bool)
        if trained is not None:
            wanted_F = _next_is_trained(ids, trained)
        wanted_F[ids.offsets[1:] - 1] = False
        num_rows = len(token_ids)
        return cls(
            token_ids_F=ids.values,
            offsets=ids.offsets.astype(np.int64),
            wanted_F=wanted_F,
            counted_F=wanted_F,
            temperature_B=np.full(num_rows, temperature, dtype=np.float32),
            group_B=np.zeros(num_rows, dtype=np.int64) if groups is None else np.asarray(groups, dtype=np.int64),
            label_B=tuple(f"row {row}" for row in range(num_rows)),
            weight_F=None if weights is None else _of_counted(weights, ids.lengths, wanted_F),
            images=images,
        )

    @property
    def num_rows(self) -> int:
        """B, the number of rows."""
        return len(self.offsets) - 1

    def token_ids(self, row: int) -> np.ndarray:
        """int64 token ids of one row."""
        return self.token_ids_F[self.offsets[row] : self.offsets[row + 1]]

    def merge_keys(self, *, by_group: bool) -> list[Any] | None:
        """Keys for `Forest.from_rows`: tokens merge only where routes and images agree, with `by_group` within groups.

        Tokens of rows with images also need equal rotary positions.
        """
        if self.routes_FLK is None and self.images is None:
            return self.group_B.tolist() if by_group else None
        columns = [np.repeat(self.group_B, np.diff(self.offsets))] if by_group else []
        columns += [] if self.routes_FLK is None else [number_routes(self.routes_FLK)]
        columns += [] if self.images is None else [self.images.image_F, *self.images.position_AF]
        return np.split(number_columns(columns), self.offsets[1:-1])


def _of_counted(weights: Sequence[Any], lengths: np.ndarray, wanted_F: np.ndarray) -> np.ndarray:
    rows = []
    for row, (given, length) in enumerate(zip(weights, lengths.tolist(), strict=True)):
        weight = np.asarray(given, dtype=np.float64)
        if weight.shape not in ((), (length,)):
            raise RowError(f"row {row}: has {length} tokens and weights of shape {weight.shape}; give one, or one each")
        if not (np.isfinite(weight) & (weight >= 0)).all():
            raise RowError(f"row {row}: has a weight that is not a finite number of at least 0")
        rows.append(np.broadcast_to(weight, length))
    weight_F = np.concatenate(rows)
    return np.where(np.append(False, wanted_F[:-1]), weight_F, 0.0)


def _next_is_trained(ids: Jagged, trained: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    masks = [np.asarray(mask) for mask in trained]
    for row, (mask, length) in enumerate(zip(masks, ids.lengths.tolist(), strict=True)):
        if len(mask) != length:
            raise RowError(f"row {row}: has {length} tokens and a mask of {len(mask)}")
        if mask[0]:
            raise RowError(f"row {row}: trains its first token, which nothing predicts; set the first mask entry to 0")
    trained_F = np.concatenate(masks) != 0 if masks else np.zeros(0, dtype=bool)
    return np.append(trained_F[1:], False) if len(trained_F) else trained_F
