"""Event streams: their frames, and waiting for an answer. If the client disconnects, its generation is cancelled."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.types import Receive

from tree_rl.rollout.gateway.protocols.exchange import Completion

STREAM_HEADERS = {"cache-control": "no-store"}


def json_bytes(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def event(body: Mapping[str, Any], kind: str = "") -> bytes:
    """An event of a stream; a kind becomes the event's name, and a field of its body."""
    if not kind:
        return b"data: " + json_bytes(body) + b"\n\n"
    return b"event: " + kind.encode() + b"\ndata: " + json_bytes({"type": kind, **body}) + b"\n\n"


async def wait_unless_client_leaves(
    task: asyncio.Task[Completion], receive: Receive, *, timeout_s: float | None
) -> bool:
    """Wait for an answer; `timeout_s=None` waits forever. The request's body must have been read.

    Returns:
        True if the answer is ready or the time is up; False if the client disconnected, which cancels the task.
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
    *,
    events: Callable[[asyncio.Task[Completion]], Iterator[bytes]],
    ping: bytes,
    every_s: float,
) -> AsyncIterator[bytes]:
    """An event stream that starts before the answer is ready.

    Sends `ping` every `every_s` seconds until then. `events` makes the other events from the finished task, errors
    included. starlette cancels this if the client disconnects, which cancels the task.
    """
    try:
        while not task.done():
            yield ping
            await asyncio.wait({task}, timeout=every_s)
        yield await asyncio.to_thread(lambda: b"".join(events(task)))
    finally:
        task.cancel()


async def _client_gone(receive: Callable[[], Awaitable[object]]) -> None:
    while True:
        message = await receive()
        if isinstance(message, dict) and message["type"] == "http.disconnect":
            return
