"""A chat request and its answer in one form for all protocols, and the interface of a protocol."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.demands import JsonDemand
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import ChatMessage, SentImage

EVENTS = "text/event-stream; charset=utf-8"
StopCause = Literal["stop", "length", "tool_calls", "stop_sequence"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """An agent's request."""

    model: str
    """Name of the model as sent, which the answer repeats. The gateway serves one model under any name."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Function schemas in OpenAI's format."""
    count: int = 1
    max_tokens: int | None = None
    """Limit of generated tokens for one answer; None means the gateway's."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters in vLLM's names."""
    is_stream: bool = False
    with_usage: bool = False
    """True if the stream ends with a usage event (OpenAI)."""
    with_log_probs: bool = False
    """True if the answer contains the log-probs of the generated tokens (OpenAI)."""
    with_reasoning_tokens: bool = False
    """True if the answer contains the number of reasoning tokens (Responses, Gemini)."""
    must_call: tuple[str, ...] = ()
    """Tools of which the answer must call one; empty if it need not."""
    one_call: bool = False
    """True if the answer makes at most one tool call."""
    json: JsonDemand | None = None
    """JSON that the answer's text must be; None for any text."""
    continues_last: bool = False
    """True if the answer continues the last message, an assistant's."""
    left_out: tuple[str, ...] = ()
    """Names of ignored parts of the request: unknown fields, media, and tools that only the provider could run."""
    images: Mapping[str, SentImage] = field(default_factory=dict)
    """Images by their marks in the messages."""
    agent: str = "main"
    """Name of the calling agent."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the HTTP request by lower-case name. Side calls are recognised by them."""
    num_bytes: int = 0
    """Size of the request's body, from which we estimate the work for it."""
    stream_type: str = EVENTS
    """Media type of a streamed answer."""


Asked = TypeVar("Asked", bound=ChatRequest, contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One answer."""

    message: ChatMessage
    stop_cause: StopCause
    stop_sequence: str | None
    """The text that ended the answer, if `stop_cause` is `stop_sequence`."""
    num_tokens: int
    tokens: tuple[tuple[str, float], ...] | None
    """Text and log-prob of each token; None unless the client asked for log-probs."""
    reasoning_tokens: int | None = None
    """Tokens up to the end of the reasoning; None unless the request asks for them."""


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
        return sum(choice.num_tokens for choice in self.choices)


class ChatProtocol(Protocol[Asked]):
    """The functions and constants that the module of each protocol has."""

    PING: bytes
    """The event that keeps a stream alive."""

    def answer(self, request: Asked, completion: Completion) -> dict[str, Any]:
        """The body of a whole answer."""

    def stream(self, request: Asked, completion: Completion) -> Iterator[bytes]:
        """The events of a streamed answer."""

    def error_body(self, error: RequestError | BackendError) -> dict[str, Any]:
        """The body of an error."""

    def error_event(self, request: Asked, error: RequestError | BackendError) -> bytes:
        """An error after a stream has started."""

    def models(self, name: str) -> dict[str, Any]:
        """The list of models, which contains only this one."""

    def model(self, name: str) -> dict[str, Any]:
        """One entry of the list of models."""
