"""HTTP connections that are not kept open for half a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_TIMEOUT_S = 60.0
"""Seconds that the head of a request may take, counted from its first byte or from the connection; also from an answer
to the end of a body that nobody reads any more. The server has no such limit."""

_Protocol: Any = AutoHTTPProtocol
"""The server's own protocol; its class depends on what is installed."""


class PatientProtocol(_Protocol):
    """Closes a connection whose client does not finish a request. The application limits bodies that it reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Read; bytes behind an answered request begin the next one."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        else:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        """Wait for the rest of a body that was answered early."""
        is_unfinished = self.cycle.more_body
        super().on_response_complete()
        if is_unfinished and not self._is_answering():
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        # Further bytes give no further time.
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        # An answer may have begun after the last byte: requests can wait behind each other.
        if not self._is_answering():
            self.transport.close()
