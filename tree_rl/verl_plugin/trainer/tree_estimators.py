"""The advantages of tree_loo, and the paths of longest_path."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from verl.protocol import DataProto

from tree_rl.tree.credit import subtree_credit
from tree_rl.tree.forest import Forest
from tree_rl.verl_plugin.trainer.advantages import session_scores
from tree_rl.verl_plugin.trainer.sessions import Sessions


def longest_paths(sessions: Sessions, row_lengths: Sequence[int]) -> list[int]:
    """Each session's longest row, in row order; among equally long rows the last.

    `row_lengths` has the number of prompt and response tokens of B rows.
    """
    lengths = np.asarray(row_lengths)
    return sorted(int(rows[::-1][np.argmax(lengths[rows[::-1]])]) for rows in sessions.rows_of_session)


def tree_loo(
    data: DataProto,
    sessions: Sessions,
    *,
    row_tokens: Sequence[np.ndarray],
    response_lengths: np.ndarray,
    token_weights: Callable[[], torch.Tensor] | None = None,
) -> DataProto:
    """Write `advantages` and `returns`, [B, T]: the `subtree_credit` of each token's segment in its prompt's group.

    Args:
        data: padded rows: token_level_scores, token_level_rewards, response_mask [B, T], uid.
        row_tokens: B arrays of token ids, prompt and response.
        response_lengths: int [B], number of response tokens at the end of each row.
        token_weights: returns `trained_token_weights`; None if the rewards contain no KL penalty.
    """
    mask_BT = data.batch["response_mask"]
    outcome_S = session_scores(data, sessions, token_weights() if token_weights else None).double().cpu().numpy()
    advantages = np.zeros(tuple(mask_BT.shape))
    uids = data.non_tensor_batch["uid"]
    for uid in dict.fromkeys(uids.tolist()):
        rows = np.flatnonzero(uids == uid).tolist()
        members, session_of_row = np.unique(sessions.session_of_row[rows], return_inverse=True)
        forest = Forest.from_rows([row_tokens[row] for row in rows])
        credit_N = subtree_credit(forest, session_of_row, outcome_S[members])[forest.segment_of_token]
        for local, row in enumerate(rows):
            credit = credit_N[forest.row_index[local]]
            advantages[row, : response_lengths[row]] = credit[len(credit) - response_lengths[row] :]
    advantages_BT = torch.from_numpy(advantages).to(data.batch["token_level_scores"]) * mask_BT
    data.batch["advantages"], data.batch["returns"] = advantages_BT, advantages_BT
    return data
