"""The recording gateway of a rollout worker: an HTTP server in the worker's event loop, and its open sessions."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tree_rl.extras import require_modules

require_modules("the gateway", "starlette", "uvicorn")

import uvicorn

from tree_rl.rollout.gateway.backend import Backend
from tree_rl.rollout.gateway.connections import HeadTimeoutProtocol
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.resumption import Resumption
from tree_rl.rollout.gateway.server import HttpApplication
from tree_rl.rollout.gateway.session import RecordedSession, Session
from tree_rl.rollout.gateway.tokens.images import ImagePlaces, ImageReader
from tree_rl.rollout.gateway.tokens.rendering import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHUTDOWN_S = 5
KEEP_ALIVE_S = 600
"""Idle seconds after which a connection closes. Agents run tools between calls and fail if it closes too early."""


class Gateway:
    """Serves a model to agents over HTTP and records what it generates.

    Use it as an asynchronous context manager, or call `start` and `close`. In between, Python's garbage collector skips
    all objects from before `start` (`gc.freeze`): scanning them would block every session for up to 0.3 s.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        model: name in the list of models.
        images: reads images of the sessions; None for a model of text, which gets a line of text instead.

    Raises:
        ValueError: this tokenizer does not allow exact ids.
    """

    def __init__(
        self,
        *,
        tokenizer: "PreTrainedTokenizerFast",
        backend: Backend,
        options: GatewayOptions,
        model: str = "policy",
        images: ImageReader | None = None,
    ) -> None:
        self.options = options
        self.images = images
        places = None if images is None else ImagePlaces(images)
        self._renderer = Renderer(tokenizer, options.template_options, dialect=options.dialect, images=places)
        self._backend = backend
        self._model = model
        self._sessions: dict[str, Session] = {}
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises `OSError` if the address is taken."""
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        self._socket = socket.create_server((self.options.host, 0), family=family)
        # Otherwise every answer waits 40 ms for an ACK. asyncio sets it only for sockets created with a protocol.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(
            HttpApplication(self._sessions, model=self._model).app(),
            http=HeadTimeoutProtocol,
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.001)
        gc.freeze()

    async def close(self) -> None:
        """Close every session and stop listening."""
        for session in tuple(self._sessions.values()):
            await self.close_session(session)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            gc.unfreeze()
        if self._socket is not None:
            self._socket.close()

    def open_session(
        self,
        *,
        sampling: Mapping[str, Any] | None = None,
        group: str | None = None,
        resumption: Resumption | None = None,
    ) -> Session:
        """Open a session; the arguments are those of `Session`."""
        session = Session(
            renderer=self._renderer,
            backend=self._backend,
            options=self.options,
            sampling=sampling or {},
            group=group,
            resumption=resumption,
        )
        self._sessions[session.id] = session
        return session

    def endpoint(self, session: Session) -> Endpoint:
        """The address and key of a session. Raises `RuntimeError` if the gateway does not listen."""
        if self._socket is None:
            raise RuntimeError("gateway used before start(): no address yet; await gateway.start()")
        host, port = self._socket.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        return Endpoint(
            url=f"http://{address}:{port}/s/{session.id}",
            token=session.token,
            model=self._model,
            stop_session=session.stop,
            ran_out_of_calls=lambda: session.is_exhausted,
        )

    async def close_session(self, session: Session) -> RecordedSession:
        """Close a session, cancel its calls and return its record; closing it again returns the same record."""
        record = await session.close()
        self._sessions.pop(session.id, None)
        return record

    async def __aenter__(self) -> "Gateway":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Server(uvicorn.Server):
    """A server that does not catch the process's signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
