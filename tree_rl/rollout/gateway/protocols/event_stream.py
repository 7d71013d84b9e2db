"""Waits for an answer while it watches the client. A client that leaves cancels its generation."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tree_rl.rollout.gateway.protocols.exchange import Completion

EVENT_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


async def wait_for(task: asyncio.Task[Completion], receive: Receive, *, timeout_s: float | None) -> bool:
    """Wait for an answer.

    Args:
        task: of the session.
        receive: of the connection, after the whole request was read.
        timeout_s: None waits forever.

    Returns:
        Whether the client is still there. If not, the task has been cancelled.
    """
    gone = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not task.done():
            task.cancel()
            await asyncio.wait({task})
            return False
        return True
    except asyncio.CancelledError:
        task.cancel()
        raise
    finally:
        gone.cancel()


class PatientStream(Response):
    """An event stream that begins before the answer is ready, and sends pings until then.

    Args:
        task: returns the answer.
        events: of the finished task, errors included.
        ping: the event that is sent while the client waits.
        every_s: seconds between pings.
    """

    def __init__(
        self,
        task: asyncio.Task[Completion],
        *,
        events: Callable[[asyncio.Task[Completion]], Iterator[bytes]],
        ping: bytes,
        every_s: float,
    ) -> None:
        super().__init__(headers=EVENT_STREAM_HEADERS)
        del self.headers["content-length"]
        self._task = task
        self._events = events
        self._ping = ping
        self._every_s = every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while not self._task.done():
            await send({"type": "http.response.body", "body": self._ping, "more_body": True})
            if not await wait_for(self._task, receive, timeout_s=self._every_s):
                return
        body = b"".join(self._events(self._task))
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _client_gone(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return
