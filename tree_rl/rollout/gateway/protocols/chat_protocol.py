"""What the server asks of a protocol. Every module of a protocol has these functions and constants."""

from collections.abc import Iterator
from typing import Any, Protocol

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Completion
from tree_rl.rollout.gateway.protocols.fields import RequestError


class ChatProtocol(Protocol):
    """A protocol in which clients ask for answers."""

    @property
    def PATH(self) -> str:  # noqa: N802 (a constant of the module)
        """Where clients post requests, behind the session's address."""

    @property
    def PING(self) -> bytes:  # noqa: N802
        """The event that keeps a stream alive."""

    def read_request(self, body: Any) -> ChatRequest:
        """Read a decoded request. Raises `RequestError`, which names the wrong field."""

    def answer(self, request: ChatRequest, completion: Completion) -> dict[str, Any]:
        """The body of a whole answer."""

    def stream(self, request: ChatRequest, completion: Completion) -> Iterator[bytes]:
        """The events of a streamed answer."""

    def error_body(self, error: RequestError | BackendError) -> dict[str, Any]:
        """The body of an error."""

    def error_event(self, error: RequestError | BackendError) -> bytes:
        """An error after a stream has begun."""

    def models(self, name: str) -> dict[str, Any]:
        """The list of models, which has this one."""

    def model(self, name: str) -> dict[str, Any]:
        """One entry of the list of models."""
