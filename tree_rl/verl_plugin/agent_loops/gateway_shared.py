"""The gateways of a rollout worker: each starts with the first session that needs it and ends with the last."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend
from tree_rl.verl_plugin.agent_loops.session_images import SessionImages

if TYPE_CHECKING:
    from tree_rl.rollout.gateway.gateway import Gateway


MOST_SESSIONS = 64
"""Sessions of a gateway that keeps their images: where rollouts never pause, one gateway for all would never end."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Lent:
    client: Any
    options: GatewayOptions
    started: "asyncio.Task[Gateway]"
    users: int = 0
    sessions: int = 0


class SharedGateways:
    """The gateways in use: each for one client and one set of options; with images for at most `MOST_SESSIONS`."""

    def __init__(self) -> None:
        self._lent: list[_Lent] = []

    @asynccontextmanager
    async def lend(
        self, client: Any, tokenizer: Any, options: GatewayOptions, *, server: str, images: SessionImages | None = None
    ) -> "AsyncIterator[Gateway]":
        """Provide the gateway for a client (verl's `LLMServerClient`) and these options.

        `server` is verl's `rollout.name`; the gateway takes the first session's `images`.
        """
        mine = (one for one in self._lent if one.client is client and one.options == options)
        lent = next((one for one in mine if images is None or one.sessions < MOST_SESSIONS), None)
        if lent is None:
            build = partial(_build, client, tokenizer, options, server, images)
            lent = _Lent(client=client, options=options, started=asyncio.create_task(_start(build)))
            self._lent.append(lent)
        lent.users += 1
        lent.sessions += 1
        try:
            yield await asyncio.shield(lent.started)
        finally:
            lent.users -= 1
            if not lent.users:
                self._lent.remove(lent)
                if not lent.started.done():
                    await asyncio.wait({lent.started})
                if lent.started.exception() is None:
                    await lent.started.result().close()


async def _start(build: "Callable[[], Gateway]") -> "Gateway":
    gateway = await asyncio.to_thread(build)
    await gateway.start()
    return gateway


def _build(
    client: Any, tokenizer: Any, options: GatewayOptions, server: str, images: SessionImages | None
) -> "Gateway":
    # The clients' SDKs take seconds to import, so only a worker that serves agents imports them.
    from tree_rl.rollout.gateway.gateway import Gateway

    special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    backend = VerlBackend(client, end_token_ids=special, server=server, images=images)
    return Gateway(tokenizer=tokenizer, backend=backend, options=options, images=images)
