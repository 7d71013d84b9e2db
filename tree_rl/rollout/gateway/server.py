"""The HTTP face of the gateway: who may ask, what is read, and how answers and errors are written."""

import asyncio
import hashlib
import re
from collections.abc import Iterator
from types import ModuleType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tree_rl.rollout.gateway import anthropic_api, openai_api
from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.events import EVENT_STREAM_HEADERS, PatientStream, wait_for
from tree_rl.rollout.gateway.exchange import ChatRequest, Completion
from tree_rl.rollout.gateway.fields import RequestError, read_json
from tree_rl.rollout.gateway.session import Session

PREFIXES = ("", "/a/{agent}", "/s/{session}", "/s/{session}/a/{agent}")
AGENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
DRAINED_BYTES = 64 << 20
"""A body over the limit is read to here and thrown away: a client that still writes would never see the answer."""
BODY_TIMEOUT_S = 60.0
STREAM_PING_S = 10.0
"""A stream begins after so long without an answer. Until then an error still has its own status."""


class Doors:
    """The sessions that can be reached, by id and by token.

    Args:
        model: name of the model.
        max_body_bytes: of one request.
    """

    def __init__(self, *, model: str, max_body_bytes: int) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_token: dict[bytes, Session] = {}
        self._model = model
        self._max_body_bytes = max_body_bytes

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, session: Session) -> None:
        """Let a session be reached."""
        self._by_id[session.id] = session
        self._by_token[_digest(session.token)] = session

    def remove(self, session: Session) -> None:
        """Let it be reached no more."""
        del self._by_id[session.id], self._by_token[_digest(session.token)]

    def sessions(self) -> list[Session]:
        """All that can be reached."""
        return list(self._by_id.values())

    def app(self) -> Starlette:
        """The ASGI application."""
        posts = {
            "/v1/chat/completions": self._chat_completions,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
        }
        gets = {"/v1/models": self._models, "/v1/models/{model:path}": self._models}
        routes = [Route(prefix + path, end, methods=["POST"]) for prefix in PREFIXES for path, end in posts.items()]
        routes += [Route(prefix + path, end, methods=["GET"]) for prefix in PREFIXES for path, end in gets.items()]
        # Starlette answers with these bodies, and still raises what nobody expected: it reaches the server's log.
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _unexpected_error})

    async def _chat_completions(self, request: Request) -> Response:
        return await self._answer(request, openai_api)

    async def _messages(self, request: Request) -> Response:
        return await self._answer(request, anthropic_api)

    async def _answer(self, request: Request, api: ModuleType) -> Response:
        session = None
        try:
            session = self._session(request)
            agent = _agent(request)
            asked = session.read(await self._body(request), api)
            task = session.start(asked, agent=agent)
        except RequestError as error:
            return _refusal(api, error, session)
        except ClientDisconnect:
            return Response(status_code=499)
        patience = STREAM_PING_S if asked.is_stream else None
        if not await wait_for(task, request.receive, timeout_s=patience):
            return Response(status_code=499)
        if not task.done():
            events = _Events(api, asked, session)
            return PatientStream(task, events=events, ping=api.PING, every_s=STREAM_PING_S)
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not isinstance(failure, RequestError | BackendError):
            session.refused[500] += 1  # nobody expected it: `_unexpected_error` answers, and the server logs it
        try:
            completion = _result(task)
        except (RequestError, BackendError) as error:
            return _refusal(api, error, session)
        if asked.is_stream:
            return Response(b"".join(api.stream(asked, completion)), headers=EVENT_STREAM_HEADERS)
        return JSONResponse(api.answer(asked, completion))

    async def _count_tokens(self, request: Request) -> Response:
        session = None
        try:
            session = self._session(request)
            asked = anthropic_api.read_count_request(read_json(await self._body(request)))
            return JSONResponse(anthropic_api.token_count(await session.count_tokens(asked)))
        except RequestError as error:
            return _refusal(anthropic_api, error, session)
        except ClientDisconnect:
            return Response(status_code=499)

    async def _models(self, request: Request) -> Response:
        api = _api(request)
        try:
            self._session(request)
        except RequestError as error:
            return _refusal(api, error, None)
        name = request.path_params.get("model")
        return JSONResponse(api.models(self._model) if name is None else api.model(name))

    def _session(self, request: Request) -> Session:
        token = request.headers.get("x-api-key") or ""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            token = bearer.strip()
        name = request.path_params.get("session")
        session = self._by_token.get(_digest(token)) if name is None else self._by_id.get(name)
        if name is not None and session is None:
            raise RequestError("no such session: it is over, or never was", status=404, code="session_not_found")
        if session is None or not session.accepts(token):
            raise RequestError(
                "expected the session's token as bearer token or x-api-key", status=401, code="invalid_api_key"
            )
        return session

    async def _body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= limit:
                        chunks.append(chunk)
                    elif size > limit + DRAINED_BYTES:
                        break
        except TimeoutError as error:
            raise RequestError(f"the body took longer than {BODY_TIMEOUT_S:.0f} s", status=408) from error
        if size > limit:
            raise RequestError(f"expected a body of at most {limit} bytes", status=413, code="request_too_large")
        return b"".join(chunks)


class _Events:
    """The events of a finished task, an error among them."""

    def __init__(self, api: ModuleType, asked: ChatRequest, session: Session) -> None:
        self._api, self._asked, self._session = api, asked, session

    def __call__(self, task: asyncio.Task[Completion]) -> Iterator[bytes]:
        try:
            yield from self._api.stream(self._asked, _result(task))
        except (RequestError, BackendError) as error:
            self._session.refused[error.status] += 1
            yield self._api.error_event(error)


def _result(task: asyncio.Task[Completion]) -> Completion:
    if task.cancelled():
        raise RequestError("the session was closed before the answer was there", status=503, code="session_closed")
    return task.result()


def _refusal(api: ModuleType, error: RequestError | BackendError, session: Session | None) -> Response:
    if session is not None:
        session.refused[error.status] += 1
    retry_after = error.retry_after if isinstance(error, BackendError) else None
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return JSONResponse(api.error_body(error), status_code=error.status, headers=headers)


def _agent(request: Request) -> str:
    name: str = request.path_params.get("agent") or request.headers.get("x-agent-name") or "main"
    if not AGENT_NAME.fullmatch(name):
        raise RequestError(
            f"expected up to 64 letters, digits, '.', '_' and '-', received {name[:80]!r}", field="x-agent-name"
        )
    return name


def _api(request: Request) -> ModuleType:
    speaks_anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
    return anthropic_api if speaks_anthropic else openai_api


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _refusal(_api(request), RequestError(f"{request.method} {request.url.path}: {error}", status=status), None)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return _refusal(_api(request), BackendError(f"the gateway failed: {type(error).__name__}", status=500), None)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
