"""What harnesses sent: a proxy in front of the gateway, and the least rows that their requests allow.

A request is a list of items: system prompt and tools, then each message. An item that the model wrote is the mark of
its generation; the text of any other is all that counts. With its answer, a request is a path; one path continues
another if it begins with it. So the least number of rows is the number of paths that no other continues: the leaves of
the tree of paths. Nothing here reads tokens or templates.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tree_rl.rollout.gateway.endpoint import Endpoint

MARK = re.compile(r"mark-(\d{6})")
HEAD = ("system", "instructions", "systemInstruction", "tools")
ENTRIES = ("messages", "input", "contents")
MADE = ("assistant", "model")
MADE_TYPES = ("function_call", "custom_tool_call", "reasoning")
WRITTEN = ("content", "text", "partial_json", "arguments", "delta", "input", "command", "functionCall", "args")
"""Keys of an answer's pieces, in all protocols."""
NOT_READ = ("cache_control", "id", "call_id", "tool_call_id", "tool_use_id", "status", "signature", "encrypted_content")
"""Keys of a message that no prompt shows."""

Item = tuple[str, str]


@dataclass(slots=True)
class RequestLog:
    """Requests that were answered with a generation, and what answered them."""

    paths: list[tuple[Item, ...]] = field(default_factory=list)
    """Items of each request, and its answer's."""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def add(self, body: dict[str, Any], answer: bytes) -> None:
        """Take a request and the body of its answer, streamed or whole."""
        marks = MARK.findall(written(answer))
        made = [("made", marks[-1])] if marks else [("unmarked", str(len(self.paths)))]
        self.paths.append((*items(body), *made))
        self.bodies.append(body)


def least_rows(paths: Sequence[tuple[Item, ...]]) -> int:
    """Leaves of the tree of paths; equal paths are calls of their own and count each."""
    begun = {path[:length] for path in paths for length in range(1, len(path))}
    return sum(path not in begun for path in paths)


def items(body: dict[str, Any]) -> Iterator[Item]:
    """A request of any protocol as items."""
    yield "head", json.dumps([body.get(name) for name in HEAD], sort_keys=True)
    entries = next((body[name] for name in ENTRIES if body.get(name)), [])
    last: Item | None = None
    for entry in [{"role": "user", "content": entries}] if isinstance(entries, str) else entries:
        is_made = entry.get("role") in MADE or entry.get("type") in MADE_TYPES
        text = "\n".join(leaf.strip() for leaf in leaves(entry) if leaf.strip())
        if not is_made:
            found: Item | None = (str(entry.get("role") or entry.get("type")), text)
        else:
            marks = MARK.findall(text)
            found = ("made", marks[-1]) if marks else None if entry.get("type") == "reasoning" else ("made", text)
        # Some protocols send a turn's text and its calls one by one.
        if found is not None and found != last:
            yield found
        last = found or last


def leaves(value: Any) -> Iterator[str]:
    """All texts in a message, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in (*NOT_READ, "role", "type"):
                yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)


def written(answer: bytes) -> str:
    """The text of an answer; a stream's pieces are put together."""
    text = answer.decode("utf-8", "replace")
    streamed = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    pieces: list[str] = []
    for one in streamed or [text]:
        try:
            pieces += _written(json.loads(one))
        except ValueError:
            continue
    return "".join(pieces)


def _written(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, str):
                yield inner if name in WRITTEN else ""
            else:
                yield from _written(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _written(inner)


@asynccontextmanager
async def logged(endpoint: Endpoint, log: RequestLog) -> AsyncIterator[Endpoint]:
    """The endpoint behind a proxy on this machine that writes `log`; stopping it stops nothing."""
    async with httpx.AsyncClient(timeout=None) as client:
        origin = httpx.URL(endpoint.url)

        async def forward(request: Request) -> StreamingResponse:
            body = await request.body()
            url = origin.copy_with(path=request.url.path, query=request.url.query.encode())
            headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"host"]
            sent = client.build_request(request.method, url, headers=headers, content=body)
            got = await client.send(sent, stream=True)

            async def pieces() -> AsyncIterator[bytes]:
                whole = bytearray()
                try:
                    async for piece in got.aiter_raw():
                        whole += piece
                        yield piece
                finally:
                    await got.aclose()
                    path = request.url.path
                    if got.status_code == 200 and request.method == "POST" and "count" not in path:
                        log.add(json.loads(body), bytes(whole))

            dropped = ("content-length", "transfer-encoding", "connection")
            kept = {name: value for name, value in got.headers.items() if name not in dropped}
            return StreamingResponse(pieces(), status_code=got.status_code, headers=kept)

        methods = ["GET", "POST", "HEAD", "DELETE", "OPTIONS"]
        app = Starlette(routes=[Route("/{path:path}", forward, methods=methods)])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = _serve(server)
        async with serving as port:
            yield replace(endpoint, url=str(origin.copy_with(port=port)), stop_session=_nothing)


async def _nothing() -> None:
    """Other agents of the session still run."""


@asynccontextmanager
async def _serve(server: uvicorn.Server) -> AsyncIterator[int]:
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
