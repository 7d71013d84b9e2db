"""Credit of each segment of a tree: how much better its sessions did than those that branched off at the last fork.

Legend: S segments, P sessions (sampled attempts), B rows; a session may have several rows.
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

    A segment's value is the mean outcome of its sessions. Its baseline is the mean outcome of the sessions that shared
    its context up to the last fork and took another branch. A fork within one session (stripped reasoning, parallel
    tools, sub-agents) does not separate outcomes: segments after it inherit the credit from before it. If sessions
    share only the prompt, every segment gets its session's leave-one-out advantage (RLOO, arXiv 2402.14740).

    TreeRL (arXiv 2506.11902) adds the difference to the parent's value and the difference to the root's. Tree-GRPO
    (arXiv 2509.21240) adds the comparison within a tree and the one across trees. Here only the last fork counts:
    everything before it is the same for both sides.

    Args:
        forest: of all rows of one prompt.
        session_of_row: int [B], sessions numbered from 0.
        outcome_P: float [P], reward of each session.

    Returns:
        float64 [S]. 0 for a segment that all sessions share; the outcome itself if there is only one session.
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
        # All sessions got the same prompt, so they all count as passing above the roots, however their contexts begin.
        above_P = passes_SP[parent] if parent >= 0 else everybody_P
        elsewhere_P = above_P & ~mine_P
        if elsewhere_P.any():
            credit_S[segment] = outcome_P[mine_P].mean() - outcome_P[elsewhere_P].mean()
        elif parent >= 0:
            credit_S[segment] = credit_S[parent]
    return credit_S
