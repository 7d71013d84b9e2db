"""The HTTP application: checks keys, reads requests, writes answers and errors."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.calls.agent_names import agent_of_headers
from tree_rl.rollout.gateway.long_work import READ, SEARCH, off_the_loop
from tree_rl.rollout.gateway.protocols import anthropic_messages, gemini, openai_chat, openai_responses
from tree_rl.rollout.gateway.protocols.event_stream import STREAM_HEADERS, patient_events, wait_unless_client_leaves
from tree_rl.rollout.gateway.protocols.exchange import ChatProtocol, ChatRequest, Completion
from tree_rl.rollout.gateway.protocols.fields import RequestError, read_json
from tree_rl.rollout.gateway.protocols.request_body import read_body
from tree_rl.rollout.gateway.session import Session, session_over

AnyRequest = TypeVar("AnyRequest", bound=ChatRequest)
PREFIXES = ("/s/{session}/a/{agent}", "/s/{session}", "/a/{agent}")
VERSIONS = ("/v1", "")
"""Versions in paths: some clients get an address with the version, some without."""
GEMINI_VERSIONS = ("/v1beta", *VERSIONS)
PATHS = (openai_chat.PATH, openai_responses.PATH, anthropic_messages.PATH, "/models")
NOTES_FOR_404 = {
    "/chat/completions": "the client's base URL contains part of this path",
    "/completions": "a bare prompt has no chat template: send messages",
    "/embeddings": "the model writes text and computes no embeddings",
    "/batches": "the gateway answers one request at a time",
    "/conversations": "the gateway stores no conversations: send previous_response_id or every item",
    "/api/": "this is not Ollama: use a client of OpenAI's API",
}
"""Notes that a 404 adds, by a part of the path that was asked for."""
SHOWN_PATH = 200
NO_HEADERS: Mapping[str, str] = {}
AGENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
STREAM_PING_S = 10.0
"""Seconds without an answer after which a stream starts. Before that an error still gets its HTTP status."""


class HttpApplication:
    """Serves open sessions, given by their ids, over HTTP."""

    def __init__(self, sessions: Mapping[str, Session], *, model: str) -> None:
        self._by_id = sessions
        self._model = model

    def app(self) -> Starlette:
        messages, responses = anthropic_messages, openai_responses
        count = partial(self._count, messages.token_count, messages.read_count_request)
        ends: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", openai_chat.PATH, partial(self._serve_chat, openai_chat, openai_chat.read_request)),
            ("POST", messages.PATH, partial(self._serve_chat, messages, messages.read_request)),
            ("POST", f"{messages.PATH}/count_tokens", count),
            ("POST", responses.PATH, self._respond),
            ("POST", f"{responses.PATH}/input_tokens", self._count_input),
            *((method, path, partial(self._stored, read)) for method, path, read in responses.ROUTES),
        ]
        models: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/models/{call:path}", self._gemini),
            ("GET", "/models", self._models),
            ("GET", "/models/{model:path}", self._models),
        ]
        versions = (*((version, ends) for version in VERSIONS), *((version, models) for version in GEMINI_VERSIONS))
        routes = [
            Route(version + path, end, methods=[method]) for version, served in versions for method, path, end in served
        ]
        # Starlette also raises unexpected errors again, so that the server logs them.
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            RequestError: _refusal,
            BackendError: _refusal,
            ClientDisconnect: _client_left,
            HTTPException: _http_error,
            Exception: _unexpected_error,
        }
        mounts = [Mount(prefix, routes=routes) for prefix in PREFIXES]
        return Starlette(routes=[*mounts, *routes], exception_handlers=handlers)

    async def _serve_chat(
        self, protocol: ChatProtocol[AnyRequest], read: Callable[[Any], AnyRequest], request: Request
    ) -> Response:
        session = self._session(request)
        asked = await _read(request, read)
        return await _respond_when_done(protocol, asked, request, session, session.start_answer(asked))

    async def _respond(self, request: Request) -> Response:
        session = self._session(request)
        stored = session.responses
        asked = await _read(request, partial(openai_responses.read_request, remembered=stored))
        task = session.start_answer(asked)
        stored.expect(asked, task)
        if asked.is_background:
            return JSONResponse(stored.body(asked.response_id))
        return await _respond_when_done(openai_responses, asked, request, session, task)

    async def _stored(self, read: openai_responses.Endpoint, request: Request) -> Response:
        session = self._session(request)
        return JSONResponse(await read(session.responses, request))

    async def _gemini(self, request: Request) -> Response:
        model, _, method = request.path_params["call"].rpartition(":")
        if method == "countTokens":
            return await self._count(gemini.token_count, partial(gemini.read_count_request, model=model), request)
        self._session(request)
        if method not in gemini.METHODS:
            raise RequestError(f"expected one of {', '.join(gemini.METHODS)}, received {method[:80]!r}", status=404)
        as_events = request.query_params.get("alt") == "sse"
        read = partial(gemini.read_request, model=model, is_stream=gemini.METHODS[method], as_events=as_events)
        return await self._serve_chat(gemini, read, request)

    async def _count_input(self, request: Request) -> Response:
        read = partial(openai_responses.read_count_request, remembered=self._session(request).responses)
        return await self._count(openai_responses.token_count, read, request)

    async def _count(
        self, write: Callable[[int], dict[str, Any]], read: Callable[[Any], ChatRequest], request: Request
    ) -> Response:
        session = self._session(request)
        return JSONResponse(write(await session.count_tokens(await _read(request, read))))

    async def _models(self, request: Request) -> Response:
        self._session(request)
        protocol = _protocol(request)
        name = request.path_params.get("model")
        return JSONResponse(protocol.models(self._model) if name is None else protocol.model(name))

    def _session(self, request: Request) -> Session:
        sent = request.headers.get("x-api-key") or request.headers.get(gemini.KEY_HEADER)
        token = sent or request.query_params.get("key", "")
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            token = bearer.strip()
        name = request.path_params.get("session")
        if name is not None and name not in self._by_id:
            raise RequestError("no such session: it is over, or never was", status=404, code="session_not_found")
        named = self._by_id.values() if name is None else [self._by_id[name]]
        session = next((one for one in named if one.accepts(token)), None)
        if session is None:
            raise RequestError(
                "expected the session's token as bearer token, x-api-key or x-goog-api-key",
                status=401,
                code="invalid_api_key",
            )
        request.state.session = session
        return session


async def _respond_when_done(
    protocol: ChatProtocol[AnyRequest],
    asked: AnyRequest,
    request: Request,
    session: Session,
    task: asyncio.Task[Completion],
) -> Response:
    """Wait for the answer; start a stream of pings if it takes longer than `STREAM_PING_S`."""
    patience = STREAM_PING_S if asked.is_stream else None
    if not await wait_unless_client_leaves(task, request.receive, timeout_s=patience):
        raise ClientDisconnect
    if not task.done():
        events = partial(_events, protocol, asked, session)
        stream = patient_events(task, events=events, ping=protocol.PING, every_s=STREAM_PING_S)
        return StreamingResponse(stream, media_type=asked.stream_type, headers=STREAM_HEADERS)
    completion = _result(task)
    # A token with its log-prob takes as long as twenty tokens without.
    cost, tokens = SEARCH if asked.with_log_probs else READ, completion.completion_tokens
    if asked.is_stream:
        written = await off_the_loop(lambda: b"".join(protocol.stream(asked, completion)), cost, tokens=tokens)
        return Response(written, media_type=asked.stream_type, headers=STREAM_HEADERS)
    return await off_the_loop(lambda: JSONResponse(protocol.answer(asked, completion)), cost, tokens=tokens)


def _events(
    protocol: ChatProtocol[AnyRequest], asked: AnyRequest, session: Session, task: asyncio.Task[Completion]
) -> Iterator[bytes]:
    try:
        yield from protocol.stream(asked, _result(task))
    except (RequestError, BackendError) as error:
        session.refused[error.status] += 1
        yield protocol.error_event(asked, error)


async def _read(request: Request, read: Callable[[Any], AnyRequest]) -> AnyRequest:
    body = await read_body(request)

    def parse() -> AnyRequest | RequestError:
        try:
            asked = read(read_json(body))
            return replace(asked, num_bytes=len(body), agent=_agent(request), headers=request.headers)
        except RequestError as error:
            # The traceback references the decoded body, and the event loop would take long to free a large one.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    asked = await off_the_loop(parse, READ, characters=len(body))
    if isinstance(asked, RequestError):
        raise asked
    return asked


def _result(task: asyncio.Task[Completion]) -> Completion:
    if task.cancelled():
        raise session_over()
    return task.result()


def _agent(request: Request) -> str:
    given: str | None = request.path_params.get("agent") or request.headers.get("x-agent-name")
    if given is None:
        return agent_of_headers(request.headers)
    if not AGENT_NAME.fullmatch(given):
        raise RequestError(
            f"expected up to 64 letters, digits, '.', '_' and '-', received {given[:80]!r}", field="x-agent-name"
        )
    return given


def _protocol(request: Request) -> ChatProtocol[Any]:
    # `request.url` fails for some Host headers.
    path = request.scope["path"]
    if openai_chat.PATH in path or openai_responses.PATH in path:
        return openai_chat
    if "anthropic-version" in request.headers or anthropic_messages.PATH in path:
        return anthropic_messages
    return gemini if gemini.speaks_gemini(request) else openai_chat


async def _refusal(
    request: Request, error: RequestError | BackendError, more: Mapping[str, str] = NO_HEADERS
) -> Response:
    session: Session | None = getattr(request.state, "session", None)
    if session is not None:
        session.refused[error.status] += 1
    retry_after = error.retry_after if isinstance(error, BackendError) else None
    headers = dict(more) if retry_after is None else {**more, "retry-after": f"{retry_after:g}"}
    if error.status == HTTPStatus.REQUEST_TIMEOUT:
        headers["connection"] = "close"
    return JSONResponse(_protocol(request).error_body(error), status_code=error.status, headers=headers)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _http_error(request: Request, error: HTTPException) -> Response:
    asked = f"{request.method} {request.scope['path'][:SHOWN_PATH]}"
    refused = RequestError(f"{asked}: {error}", status=error.status_code)
    if error.status_code == HTTPStatus.NOT_FOUND:
        served = ", ".join(f"/v1{path}" for path in PATHS)
        note = next((f"; {note}" for path, note in NOTES_FOR_404.items() if path in asked), "")
        refused = RequestError(f"{asked}: expected {served} or /v1beta/models/MODEL:METHOD{note}", status=404)
    return await _refusal(request, refused, error.headers or NO_HEADERS)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return await _refusal(request, BackendError(f"the gateway failed: {type(error).__name__}", status=500))
