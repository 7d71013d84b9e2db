"""Waits for an answer while it watches the client. A client that leaves cancels its generation."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from starlette.types import Receive

from tree_rl.rollout.gateway.protocols.exchange import Completion

STREAM_HEADERS = {"cache-control": "no-store"}


async def wait_for(task: asyncio.Task[Completion], receive: Receive, *, timeout_s: float | None) -> bool:
    """Wait for an answer; `timeout_s=None` waits forever.

    Returns whether the client is still there. If not, the task has been cancelled. The request was already received.
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


async def patient_events(
    task: asyncio.Task[Completion],
    receive: Receive,
    *,
    events: Callable[[asyncio.Task[Completion]], Iterator[bytes]],
    ping: bytes,
    every_s: float,
) -> AsyncIterator[bytes]:
    """An event stream that begins before the answer is ready.

    Until then it sends a ping every so many seconds. `events` makes the rest of the finished task, errors included.
    """
    while not task.done():
        yield ping
        if not await wait_for(task, receive, timeout_s=every_s):
            return
    yield await asyncio.to_thread(lambda: b"".join(events(task)))


async def _client_gone(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return
