"""Reads the body of a request, limits its size and time, and decompresses it."""

import asyncio
import zlib
from http import HTTPStatus

from starlette.requests import Request

from tree_rl.rollout.gateway.protocols.fields import RequestError

MAX_BODY_BYTES = 8 << 20
"""Largest body, after decompression. Larger ones are refused with status 413."""
DRAINED_BYTES = 64 << 20
"""Bytes over the limit that we still read and drop, because a client that is still sending does not see the error."""
BODY_TIMEOUT_S = 60.0
ENCODINGS = ("gzip", "x-gzip", "deflate")
EITHER_HEADER = zlib.MAX_WBITS | 32
"""Setting of zlib that detects gzip's and zlib's format."""


async def read_body(request: Request) -> bytes:
    """Read and decompress the body. Raises `RequestError` if it is too large, too slow, or in an unknown encoding."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    body = await _received(request)
    if encoding in ("identity", ""):
        return body
    if encoding not in ENCODINGS:
        raise RequestError(
            f"content-encoding: expected {', '.join(ENCODINGS)} or none, received {encoding[:40]!r}", status=415
        )
    # A few kilobytes can decompress to the limit.
    return await asyncio.to_thread(_unfolded, body, encoding)


def _unfolded(body: bytes, encoding: str) -> bytes:
    unfold = zlib.decompressobj(EITHER_HEADER)
    try:
        plain = unfold.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise RequestError(f"content-encoding: expected data of {encoding}, received others ({error})") from None
    if len(plain) > MAX_BODY_BYTES:
        raise _too_large()
    if not unfold.eof or unfold.unused_data:
        raise RequestError(f"content-encoding: expected one whole stream of {encoding}")
    return plain


async def _received(request: Request) -> bytes:
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
        raise _too_large()
    return b"".join(chunks)


def _too_large() -> RequestError:
    return RequestError(f"expected a body of at most {MAX_BODY_BYTES} bytes", status=413, code="request_too_large")
