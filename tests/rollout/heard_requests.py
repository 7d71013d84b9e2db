"""What clients send, as they send it: a gateway that keeps every request."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette

from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.server import HttpApplication

Event = MutableMapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeardRequest:
    """A request that the gateway answered."""

    path: str
    headers: Mapping[str, str]
    body: Any
    status: int


class ListeningGateway(Gateway):
    """Keeps requests with a body in `heard`, in the order of their answers."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.heard: list[HeardRequest] = []
        self._http = _ListeningApplication(self.heard, model="policy")


class _ListeningApplication(HttpApplication):
    def __init__(self, heard: list[HeardRequest], *, model: str) -> None:
        super().__init__(model=model)
        self._heard = heard

    def app(self) -> Starlette:
        app = super().app()
        app.add_middleware(_Listener, heard=self._heard)
        return app


class _Listener:
    def __init__(self, app: Callable[..., Awaitable[None]], heard: list[HeardRequest]) -> None:
        self._app, self._heard = app, heard

    async def __call__(
        self, scope: Event, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]
    ) -> None:
        body, status = bytearray(), 0

        async def hear() -> Event:
            event = await receive()
            body.extend(event.get("body", b""))
            return event

        async def answer(event: Event) -> None:
            nonlocal status
            status = event.get("status", status)
            await send(event)

        await self._app(scope, hear, answer)
        if body:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            self._heard.append(HeardRequest(path=scope["path"], headers=headers, body=json.loads(body), status=status))
