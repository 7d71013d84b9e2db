"""Groups rows that are branches of one session, and counts how often a session trains each of its tokens.

verl's key of a row is `{uid}_{session}_{branch}`. The row with the highest branch is the session's final row and has
its outcome. Legend: B rows, S sessions, T padded response length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tree_rl.tree import Forest
from tree_rl.verl_plugin.path_weights import weights_within
from tree_rl.verl_plugin.resume.row_names import row_place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sessions:
    """The sessions of a batch, numbered in order of appearance."""

    session_of_row: np.ndarray
    """Session of each row, int64 [B]."""
    rows_of_session: tuple[np.ndarray, ...]
    """Rows of each session, S int64 arrays, the final row last."""

    @classmethod
    def from_keys(cls, keys: Sequence[str]) -> "Sessions":
        """Read the sessions from row keys; raises a ValueError for a key that is not `{uid}_{session}_{branch}`."""
        members: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for row, key in enumerate(keys):
            uid, session, branch = row_place(key)
            members.setdefault((uid, session), []).append((branch, row))
        rows = tuple(np.array([row for _, row in sorted(own)], dtype=np.int64) for own in members.values())
        session_of_row = np.zeros(len(keys), dtype=np.int64)
        for number, own in enumerate(rows):
            session_of_row[own] = number
        return cls(session_of_row=session_of_row, rows_of_session=rows)

    def __len__(self) -> int:
        return len(self.rows_of_session)

    @property
    def branched(self) -> bool:
        return len(self) < len(self.session_of_row)

    @property
    def final_rows(self) -> np.ndarray:
        """int64 [S], the row with each session's outcome."""
        return np.array([rows[-1] for rows in self.rows_of_session], dtype=np.int64)


def trained_token_weights(
    sessions: Sessions, row_tokens: Sequence[np.ndarray], response_mask_BT: torch.Tensor, response_lengths: np.ndarray
) -> torch.Tensor:
    """Weights that count every unique trained token of a session once.

    Args:
        row_tokens: B arrays of token ids, prompt and response.
        response_mask_BT: nonzero where trained.
        response_lengths: int [B], number of response tokens at the end of each row.

    Returns:
        float32 [B, T]: 1 / (rows of the session that train the token) where trained, else 0.
    """
    weights_BT = (response_mask_BT != 0).to(torch.float32)
    trained_BT = weights_BT.cpu().numpy() != 0
    for rows in sessions.rows_of_session:
        if len(rows) == 1:
            continue
        tokens = [row_tokens[row] for row in rows]
        trained = [trained_BT[row, : response_lengths[row]] for row in rows]
        for row, weight in zip(rows, weights_within(Forest.from_rows(tokens), trained), strict=True):
            weights_BT[row, : len(weight)] = torch.from_numpy(weight).to(weights_BT)
    return weights_BT
