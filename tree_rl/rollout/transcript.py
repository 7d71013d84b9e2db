"""Rows of a session's model calls, one per branch.

The log-prob of a generated token holds for the exact tokens before it. So a token of a row is trained (mask 1) only if
a call generated it behind exactly the row's tokens. All other tokens are context (mask 0), however similar their text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

SharedTokens = Literal["every_row", "first_row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCall:
    """One request to the model, and its answer.

    Raises:
        ValueError: the prompt is empty, or log-probs do not match the response.
    """

    prompt_ids: tuple[int, ...]
    """Token ids the model was given."""
    response_ids: tuple[int, ...]
    """Token ids it generated, with the end token."""
    log_probs: tuple[float, ...] | None
    """Log-prob of each generated token when it was drawn; None if the server reported none."""
    turn: int = 0
    """Number of assistant turns in its context."""
    agent: str = "main"
    """Name of the agent that asked."""
    min_version: int | None = None
    """Oldest weights that generated a token of it; None if the server reported none."""
    max_version: int | None = None
    """Newest weights that did."""
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """int [prompt and generated tokens, decoder layers, experts per token], experts that each token visited. The last
    token is missing if the model never read it. None if the server reported none."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("model call with an empty prompt: expected at least one token id")
        if self.log_probs is not None and len(self.log_probs) != len(self.response_ids):
            raise ValueError(f"{len(self.response_ids)} generated tokens with {len(self.log_probs)} log-probs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One branch of a session, as a trainer stores it."""

    prompt_ids: tuple[int, ...]
    """The session's first prompt. If the branch does not start with it, its own context up to the first trained
    token."""
    response_ids: tuple[int, ...]
    """Everything behind the prompt: generated tokens, observations, history that was rendered anew."""
    response_mask: tuple[int, ...]
    """1 for a token that was generated in exactly this context and is trained in this row, otherwise 0."""
    response_log_probs: tuple[float, ...] | None
    """Recorded log-prob where the mask is 1, 0.0 elsewhere. None if a call reported none."""
    response_calls: tuple[int, ...]
    """Index of the call that generated the token in this context, whether this row trains it or not. -1 for context."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids


def rows_of_calls(calls: Sequence[ModelCall], *, shared: SharedTokens = "every_row") -> list[Row]:
    """Cut a session into rows.

    A call extends a row if its prompt continues all tokens of the row; the tokens between are an observation. Any other
    call opens a new row: reasoning was stripped, or a parallel branch starts.

    Args:
        calls: in the order they were answered.
        shared: where a generated token is trained that several rows contain in the same context. `every_row`: its
            weight grows with the number of branches behind it, as with independent rows. `first_row`: once.

    Returns:
        Rows in the order they were opened, without those that train nothing. If no row trains, the first one.
    """
    sequences = [np.array(call.prompt_ids + call.response_ids, dtype=np.int64) for call in calls]
    branches: list[int] = []
    for index, call in enumerate(calls):
        continued = [slot for slot, last in enumerate(branches) if _starts_with(call.prompt_ids, sequences[last])]
        if continued:
            branches[max(continued, key=lambda slot: len(sequences[branches[slot]]))] = index
        else:
            branches.append(index)

    rows: list[Row] = []
    trained_before: list[tuple[np.ndarray, np.ndarray]] = []
    for last in branches:
        tokens = sequences[last]
        call_of_token, log_probs = _generated_in_context(tokens, calls, sequences)
        mask = call_of_token >= 0
        if shared == "first_row":
            for other_tokens, other_mask in trained_before:
                common = _common_prefix(tokens, other_tokens)
                mask[:common] &= ~other_mask[:common]
            trained_before.append((tokens, mask.copy()))
        rows.append(_row(tokens, mask, log_probs, call_of_token, calls, last))
    training = [row for row in rows if any(row.response_mask)]
    return training or rows[:1]


def _generated_in_context(
    tokens: np.ndarray, calls: Sequence[ModelCall], sequences: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    call_of_token = np.full(len(tokens), -1, dtype=np.int64)
    log_probs = np.zeros(len(tokens))
    for index, (call, sequence) in enumerate(zip(calls, sequences, strict=True)):
        start = len(call.prompt_ids)
        stop = _common_prefix(tokens, sequence)
        if stop > start:
            call_of_token[start:stop] = index
            if call.log_probs is not None:
                log_probs[start:stop] = call.log_probs[: stop - start]
    return call_of_token, log_probs


def _row(
    tokens: np.ndarray,
    mask: np.ndarray,
    log_probs: np.ndarray,
    call_of_token: np.ndarray,
    calls: Sequence[ModelCall],
    last: int,
) -> Row:
    first_prompt = np.array(calls[0].prompt_ids, dtype=np.int64)
    starts_alike = _starts_with(tokens, first_prompt) and len(first_prompt) < len(tokens)
    split = len(first_prompt) if starts_alike else len(calls[last].prompt_ids)
    # A prompt may contain tokens that another call generated. Only the response is trained, so they stay in it.
    split = min(split, int(mask.argmax())) if mask.any() else split
    has_log_probs = all(call.log_probs is not None for call in calls)
    return Row(
        prompt_ids=tuple(tokens[:split].tolist()),
        response_ids=tuple(tokens[split:].tolist()),
        response_mask=tuple(mask[split:].astype(int).tolist()),
        response_log_probs=tuple(np.where(mask, log_probs, 0.0)[split:].tolist()) if has_log_probs else None,
        response_calls=tuple(call_of_token[split:].tolist()),
    )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    width = min(len(a), len(b))
    equal = a[:width] == b[:width]
    return width if equal.all() else int(equal.argmin())


def _starts_with(tokens: Sequence[int] | np.ndarray, prefix: np.ndarray) -> bool:
    return len(tokens) >= len(prefix) and bool(np.array_equal(np.asarray(tokens[: len(prefix)]), prefix))
