"""A chat request and its answer, in one form for every protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tree_rl.rollout.gateway.protocols.messages import ChatMessage

StopCause = Literal["stop", "length", "tool_calls", "stop_sequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """What an agent asks for."""

    model: str
    """As sent. The answer carries it back. The gateway serves one model under every name."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's function format."""
    count: int = 1
    """Number of answers (`n`)."""
    max_tokens: int | None = None
    """Limit of generated tokens for one answer. None leaves it to the gateway."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Temperature and the like, in vLLM's names."""
    is_stream: bool = False
    with_usage: bool = False
    """End the stream with a usage event (OpenAI)."""
    with_log_probs: bool = False
    """Answer with the log-probs of the generated tokens (OpenAI)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedToken:
    """One token of an answer and its log-prob."""

    text: str
    log_prob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One answer."""

    message: ChatMessage
    stop_cause: StopCause
    stop_sequence: str | None
    """The text that ended the answer, if `stop_cause` is `stop_sequence`."""
    num_tokens: int
    """Generated tokens."""
    tokens: tuple[GeneratedToken, ...] | None
    """None unless the client asked for log-probs."""


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
