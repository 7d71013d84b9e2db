"""What the last inference found out about rows, valid as long as the weights have not moved: updates reuse it."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import torch

from tree_rl.training.rows import Rows


class RowMemory:
    """One tensor per row, known by the row's tokens, mask, temperature and replayed routes."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._rows: dict[tuple[bytes, float], torch.Tensor] = {}

    def remember(self, rows: Rows, values: Sequence[torch.Tensor]) -> None:
        """Keep the tensors of all rows of a call, and only those."""
        self._rows = {_key(rows, row): value.detach().cpu() for row, value in enumerate(values)}

    def forget(self) -> None:
        """The weights have moved."""
        self._rows.clear()

    def recall(self, rows: Rows, members: Iterable[int]) -> list[torch.Tensor] | None:
        """The tensors of the given rows, or None if any of them is unknown."""
        found = [self._rows.get(_key(rows, row)) for row in members]
        known = [value for value in found if value is not None]
        return known if len(known) == len(found) else None


def _key(rows: Rows, row: int) -> tuple[bytes, float]:
    wanted = rows.wanted_F[rows.offsets[row] : rows.offsets[row + 1]]
    routes = rows.routes(row)
    known_by = rows.token_ids(row).tobytes() + wanted.tobytes()
    if routes is not None:
        known_by += blake2b(routes.tobytes(), digest_size=16).digest()
    return known_by, float(rows.temperature_B[row])
