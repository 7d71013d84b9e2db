"""Closes HTTP connections whose clients do not finish a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_TIMEOUT_S = 60.0
"""Seconds from the connection or a request's first byte to the end of its head, and from an early answer to the end of
the request's body. uvicorn has no such limit."""

_Protocol: Any = AutoHTTPProtocol
"""uvicorn's protocol; its class depends on what is installed."""


class HeadTimeoutProtocol(_Protocol):
    """Limits the time of a request's head and of unread bodies; the application limits bodies that it reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Read; bytes after an answered request start the next one."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        else:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        is_unfinished = self.cycle.more_body
        super().on_response_complete()
        if is_unfinished and not self._is_answering():
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        # Further bytes do not extend the time.
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        # With pipelined requests an answer may have started after the last byte.
        if not self._is_answering():
            self.transport.close()
