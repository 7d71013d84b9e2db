"""Credit of the segments of a tree: what continuing here was worth, against those who left at the last fork.

Legend: S segments, P sessions (sampled attempts), B rows; a session may own several rows.
"""

import numpy as np

from tree_rl.tree.forest import Forest


def sessions_of_segments(forest: Forest, session_of_row: np.ndarray) -> np.ndarray:
    """Which sessions pass through each segment, bool [S, P]; ``session_of_row`` is int [B], numbered from 0."""
    passes_SP = np.zeros((forest.num_segments, int(session_of_row.max()) + 1), dtype=bool)
    segment_of_token = forest.segment_of_token
    for row, session in enumerate(session_of_row):
        passes_SP[segment_of_token[forest.row_index[row]], session] = True
    return passes_SP


def subtree_credit(forest: Forest, session_of_row: np.ndarray, outcome_P: np.ndarray) -> np.ndarray:
    """Leave-one-out over sibling subtrees.

    A segment's value is the mean outcome of its sessions; its baseline is the mean outcome of the sessions that shared
    its context up to the last fork and went elsewhere. A fork inside one session (stripped reasoning, parallel tools,
    sub-agents) is nobody's choice between outcomes: behind it the credit stays. So, where sessions share no more than
    the prompt, every segment has its session's leave-one-out advantage (RLOO, arXiv 2402.14740).

    TreeRL (arXiv 2506.11902) adds the difference to the parent's value and that to the root's; Tree-GRPO (arXiv
    2509.21240) adds the comparison within a tree and that across trees. Here the last fork alone counts: what happened
    before it is the same for both sides.

    Args:
        forest: of all rows of one prompt.
        session_of_row: int [B], sessions numbered from 0.
        outcome_P: float [P], reward of each session.

    Returns:
        float64 [S]. 0 for a segment that all sessions share; the outcome itself where there is one session only.
    """
    if len(outcome_P) == 1:
        return np.full(forest.num_segments, float(outcome_P[0]))
    outcome_P = outcome_P.astype(np.float64)
    passes_SP = sessions_of_segments(forest, session_of_row)
    everybody_P = np.ones(len(outcome_P), dtype=bool)
    credit_S = np.zeros(forest.num_segments)
    for segment in range(forest.num_segments):
        mine_P = passes_SP[segment]
        parent = int(forest.segments.parent[segment])
        # Above the roots stands the prompt, which all sessions were given, however their contexts begin.
        above_P = passes_SP[parent] if parent >= 0 else everybody_P
        elsewhere_P = above_P & ~mine_P
        if elsewhere_P.any():
            credit_S[segment] = outcome_P[mine_P].mean() - outcome_P[elsewhere_P].mean()
        elif parent >= 0:
            credit_S[segment] = credit_S[parent]
    return credit_S
