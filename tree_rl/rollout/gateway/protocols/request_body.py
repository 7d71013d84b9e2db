"""Reads the body of a request, and limits its size and time."""

import asyncio
from http import HTTPStatus

from starlette.requests import Request

from tree_rl.rollout.gateway.protocols.fields import RequestError

MAX_BODY_BYTES = 8 << 20
"""Largest body. Larger ones are refused with status 413."""
DRAINED_BYTES = 64 << 20
"""Bytes over the limit that we still read and drop, because a client that is still sending does not see the error."""
BODY_TIMEOUT_S = 60.0


async def read_body(request: Request) -> bytes:
    """Read the body. Raises `RequestError` if it is too large, too slow, or encoded."""
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BODY_BYTES:
                    chunks.append(chunk)
                elif size > MAX_BODY_BYTES + DRAINED_BYTES:
                    break
    except TimeoutError as error:
        raise RequestError(
            f"the body took longer than {BODY_TIMEOUT_S:.0f} s", status=HTTPStatus.REQUEST_TIMEOUT
        ) from error
    if size > MAX_BODY_BYTES:
        raise RequestError(f"expected a body of at most {MAX_BODY_BYTES} bytes", status=413, code="request_too_large")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise RequestError(f"content-encoding: expected none, received {encoding[:40]!r}", status=415)
    return b"".join(chunks)
