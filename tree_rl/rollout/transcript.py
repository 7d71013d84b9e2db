"""Rows of a session's model calls, one per branch.

The log-prob of a generated token is valid only after the exact tokens before it. So a token of a row is trained (mask
1) only if a call generated it after exactly the row's tokens. All other tokens are context (mask 0), however similar
their text. Side calls can have a smaller weight, or 0.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from tree_rl.tree import Forest


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """One model call. Raises `ValueError` if the prompt is empty or log-probs do not match the response."""

    prompt_ids: tuple[int, ...]
    """Token ids of the model's input."""
    response_ids: tuple[int, ...]
    """Generated token ids, including the end token."""
    log_probs: tuple[float, ...] | None
    """Log-prob of each generated token in the distribution it was sampled from; None if the server reported none."""
    turn: int = 0
    """Number of assistant turns in the context."""
    agent: str = "main"
    """Name of the agent that made the call."""
    side: str | None = None
    """Kind of side call (a title, a summary); None for the task itself."""
    weight: float = 1.0
    """Weight of its tokens in the loss; 0 excludes them."""
    min_version: int | None = None
    """Oldest version of the weights that generated a token; None if the server reported none."""
    max_version: int | None = None
    """Newest version of the weights that generated a token; None if the server reported none."""
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """int [prompt and generated tokens, decoder layers, experts per token], experts of each token. The last token is
    missing if the model never processed it. None if the server reported none."""
    finish_reason: Literal["stop", "length", "abort"] | None = field(default=None, compare=False)
    """What ended the turn, as in `Generation`."""
    seconds: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    """Time of the request and of the answer, by `time.monotonic`; twice 0.0 if nobody measured it."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("model call with an empty prompt: expected at least one token id")
        if self.log_probs is not None and len(self.log_probs) != len(self.response_ids):
            raise ValueError(f"{len(self.response_ids)} generated tokens with {len(self.log_probs)} log-probs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One path through a session's token tree, as a trainer stores it."""

    prompt_ids: tuple[int, ...]
    """The session's first prompt. If the branch does not start with it, the branch's context up to the first trained
    token."""
    response_ids: tuple[int, ...]
    """All tokens after the prompt: generated tokens, observations, history that was rendered again."""
    response_mask: tuple[int, ...]
    """1 for a token that was generated in exactly this context and is trained in this row, otherwise 0."""
    response_log_probs: tuple[float, ...] | None
    """Recorded log-prob where the mask is 1, 0.0 elsewhere. None if a call reported none."""
    response_calls: tuple[int, ...]
    """Index of the call that generated the token in this context, whether this row trains it or not. -1 for context."""
    response_weights: tuple[float, ...] | None = None
    """Weight of each response token in the loss, 0.0 where the mask is 0. None if every trained token has weight 1."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.response_ids


def rows_of_calls(calls: Sequence[ModelCall]) -> list[Row]:
    """Split a session, calls in the order of their answers, into rows.

    A call extends a row if its prompt continues all tokens of the row; the tokens between are an observation. Any other
    call starts a new row: reasoning was stripped, or a parallel branch begins. A generated token that several rows
    contain in the same context is trained in all of them, as in independent rows. A call of weight 0, or one that
    generated nothing, is context at most: no row ends with it, since verl puts the reward on a row's last token, which
    some estimators read only if it is trained.

    Returns:
        Rows in the order of their first calls. If no call is trained, the first row, which trains nothing.
    """
    if not calls:
        return []
    forest = Forest.from_rows([np.array(call.prompt_ids + call.response_ids, dtype=np.int64) for call in calls])
    paths = [forest.row_index[index] for index in range(len(calls))]
    call_of_node, log_prob_of_node, weight_of_node = _generated(calls, paths, forest.num_unique)
    rows: list[Row] = []
    trained = [index for index, call in enumerate(calls) if call.weight > 0 and call.response_ids]
    for last in _branches(trained or [0], calls, paths, forest.num_unique):
        path = paths[last]
        weights, log_probs, call_of_token = weight_of_node[path], log_prob_of_node[path], call_of_node[path]
        rows.append(_row(forest.input_ids[path], weights, log_probs, call_of_token, calls, last))
    return rows


def _branches(
    chosen: Sequence[int], calls: Sequence[ModelCall], paths: Sequence[np.ndarray], num_nodes: int
) -> list[int]:
    """Index of each row's last call; rows in the order of their first calls.

    `chosen` calls form rows; `paths` are the nodes of the token trie on the path of each call's tokens.
    """
    branches: list[int] = []
    is_end = np.zeros(num_nodes, dtype=bool)
    rows_at: dict[int, list[int]] = defaultdict(list)
    for index in chosen:
        call, path = calls[index], paths[index]
        continued = np.flatnonzero(is_end[path[: len(call.prompt_ids)]])
        if len(continued):
            before = int(path[continued[-1]])
            row = heappop(rows_at[before])
            is_end[before] = bool(rows_at[before])
            branches[row] = index
        else:
            row = len(branches)
            branches.append(index)
        heappush(rows_at[int(path[-1])], row)
        is_end[path[-1]] = True
    return branches


def _generated(
    calls: Sequence[ModelCall], paths: Sequence[np.ndarray], num_nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each node of the token trie: the last call that generated it (-1: none), the log-prob there (0.0: none), and
    the largest weight of a call that generated it (0.0: none)."""
    call_of_node = np.full(num_nodes, -1, dtype=np.int64)
    log_prob_of_node = np.zeros(num_nodes)
    weight_of_node = np.zeros(num_nodes)
    for index, (call, path) in enumerate(zip(calls, paths, strict=True)):
        generated = path[len(call.prompt_ids) :]
        call_of_node[generated] = index
        weight_of_node[generated] = np.maximum(weight_of_node[generated], call.weight)
        if call.log_probs is not None:
            log_prob_of_node[generated] = call.log_probs
    return call_of_node, log_prob_of_node, weight_of_node


def _row(
    tokens: np.ndarray,
    weights: np.ndarray,
    log_probs: np.ndarray,
    call_of_token: np.ndarray,
    calls: Sequence[ModelCall],
    last: int,
) -> Row:
    mask = weights > 0
    first_prompt = calls[0].prompt_ids
    has_first_prompt = len(first_prompt) < len(tokens) and np.array_equal(tokens[: len(first_prompt)], first_prompt)
    split = len(first_prompt) if has_first_prompt else len(calls[last].prompt_ids)
    # The last call's prompt may contain trained tokens of earlier calls. They must be in the response.
    split = min(split, int(mask.argmax())) if mask.any() else split
    has_log_probs = all(call.log_probs is not None for call in calls)
    return Row(
        prompt_ids=tuple(tokens[:split].tolist()),
        response_ids=tuple(tokens[split:].tolist()),
        response_mask=tuple(mask[split:].astype(int).tolist()),
        response_log_probs=tuple(np.where(mask, log_probs, 0.0)[split:].tolist()) if has_log_probs else None,
        response_calls=tuple(call_of_token[split:].tolist()),
        response_weights=None if np.array_equal(weights, mask) else tuple(weights[split:].tolist()),
    )
