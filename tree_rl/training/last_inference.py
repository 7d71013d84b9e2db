"""Results of the last inference by row, which updates reuse as long as the weights have not changed."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch

from tree_rl.training.rows import Rows


class LastInference:
    """One tensor per row, keyed by the row's tokens, mask, temperature and replayed routes."""

    def __init__(self) -> None:
        self._rows: dict[tuple[bytes, float], torch.Tensor] = {}

    def remember(self, rows: Rows, values: Sequence[torch.Tensor]) -> None:
        """Replace the contents by the tensors of all rows of a call; rows with images are not kept."""
        kept = () if rows.images is not None else values
        self._rows = {_key(rows, row): value.detach().cpu() for row, value in enumerate(kept)}

    def forget(self) -> None:
        """Drop everything, because the weights have changed."""
        self._rows.clear()

    def recall(self, rows: Rows, members: Iterable[int]) -> list[torch.Tensor] | None:
        """The tensors of the given rows, or None if any of them is unknown."""
        if rows.images is not None:
            return None
        found = [self._rows.get(_key(rows, row)) for row in members]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None


def _key(rows: Rows, row: int) -> tuple[bytes, float]:
    place = slice(rows.offsets[row], rows.offsets[row + 1])
    content = rows.token_ids_F[place].tobytes() + rows.wanted_F[place].tobytes()
    if rows.routes_FLK is not None:
        content += blake2b(rows.routes_FLK[place].tobytes(), digest_size=16).digest()
    return content, float(rows.temperature_B[row])
