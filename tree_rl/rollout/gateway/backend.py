"""The interface of the gateway's model server: token ids in; token ids, log-probs and weight versions out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

LARGEST_LOG_PROB = 1e-5
"""Largest log-prob that we accept: rounding may put the log of a probability of 1 above 0."""
FinishReason = Literal["stop", "length", "abort"]


class BackendError(Exception):
    """The model server cannot answer.

    Args:
        status: HTTP status the agent receives (429 when overloaded, 500 and above when broken).
        retry_after: seconds after which the agent may try again.
    """

    def __init__(self, message: str, *, status: int = 500, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The answer to one prompt. Raises if its log-probs do not match the tokens, are not finite, or above 0."""

    token_ids: tuple[int, ...]
    """Generated ids, including the end token."""
    log_probs: tuple[float, ...] | None
    """Log-prob of each id in the distribution it was drawn from; None if the server reports none."""
    finish_reason: FinishReason
    """What ended the turn. stop: the model. length: a limit. abort: the server, which returned what it had."""
    min_version: int | None = None
    """Oldest weights used; None if the server reports none."""
    max_version: int | None = None
    """Newest weights used."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server had cached; None if it reports none."""
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Expert routes of prompt and answer, see `transcript.ModelCall.routes`; None if the server reports none."""

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} generated tokens with {len(self.log_probs)} log-probs")
        for position, log_prob in enumerate(self.log_probs or ()):
            if not -math.inf < log_prob <= LARGEST_LOG_PROB:
                raise BackendError(
                    f"model server: expected log-probs that are finite and at most 0, received {log_prob} for token "
                    f"{position} of an answer (id {self.token_ids[position]}): its model or its sampler is broken"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer(Generation):
    """A generated turn. Its ids end with the end token, with the token that completes a stop text, or at a limit."""

    stop_text: str | None
    """The stop text that ended the turn, if one did."""
    text: str
    """Decoded turn without its end token, or up to the stop text. The agent gets the message read from it."""
    text_ids: tuple[int, ...] | None
    """The token ids of `text`; None if the stop text begins inside a token."""


class Backend(Protocol):
    """A language model that the gateway serves."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Continue a prompt. Cancelling the call cancels the generation if the server can do that.

        Args:
            sampling: vLLM's names: `temperature, top_p, top_k, seed, ...`. With `json_output: enforce` also
                `json_schema`: sample only JSON of this schema and report the log-probs of that distribution, or raise
                `ValueError`.
            session: id of the agent's session, behind its group's (`group/session`) if it has one: sessions with one
                prefix go to one server.

        Raises:
            BackendError: the server failed. The error names the HTTP status for the agent.
            ValueError: the server refuses the request. The agent sees status 400.
        """
