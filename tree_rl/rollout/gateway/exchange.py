"""A chat request and its answer, in the terms that both APIs share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tree_rl.rollout.gateway.messages import ChatMessage

StopCause = Literal["stop", "length", "tool_calls", "stop_sequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """What an agent asks for."""

    model: str
    """As sent; answers carry it back. The gateway serves one model under every name."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's function format."""
    count: int = 1
    """Answers wanted (`n`)."""
    max_tokens: int | None = None
    """Generated tokens of one answer at most; None leaves it to the gateway."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Temperature and the like, in vLLM's names."""
    is_stream: bool = False
    with_usage: bool = False
    """End the stream with a usage event (OpenAI)."""
    with_log_probs: bool = False
    """Carry log-probs of the generated tokens (OpenAI)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedToken:
    """One token of an answer, for clients that ask for log-probs."""

    text: str
    log_prob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One answer."""

    message: ChatMessage
    stop_cause: StopCause
    stop_sequence: str | None
    """The text that ended it, for `stop_sequence`."""
    num_tokens: int
    """Generated tokens."""
    tokens: tuple[GeneratedToken, ...] | None
    """None unless asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """All answers to a request."""

    id: str
    created: int
    """Unix time in seconds."""
    prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all answers."""
        return sum(choice.num_tokens for choice in self.choices)
