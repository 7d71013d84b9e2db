"""Router replay: the experts to which a row's tokens were routed, from the recorded calls.

Legend: L decoder layers, K experts per token.
"""

from collections.abc import Sequence

import numpy as np

from tree_rl.rollout.transcript import Row


def routes_of_row(row: Row, routes: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Experts of a row's tokens, [prompt and response tokens, L, K]; zeros where nothing was recorded.

    A token has the experts of the first call that computed it in this context, so branches agree on shared tokens.
    None if a call that generated a token of the row recorded none. `routes` are those of each call of the session.
    """
    calls = np.array(row.response_calls)
    recorded: list[np.ndarray] = []
    done = 0
    for call in sorted(set(row.response_calls) - {-1}):
        of_call = routes[call] if call < len(routes) else None
        if of_call is None:
            return None
        # Row and call have the same tokens up to the last token that the call generated in the row.
        end = len(row.prompt_ids) + int(np.flatnonzero(calls == call)[-1]) + 1
        recorded.append(of_call[done:end])
        done += len(recorded[-1])
    if not recorded:
        return None
    filler = np.zeros((len(row.token_ids) - done, *recorded[0].shape[1:]), dtype=recorded[0].dtype)
    return np.concatenate([*recorded, filler])
