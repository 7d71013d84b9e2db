"""Stores the responses of one session, for `previous_response_id` and item references, and serves them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request

from tree_rl.rollout.gateway.protocols.exchange import Completion
from tree_rl.rollout.gateway.protocols.fields import RequestError, wrong
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage, SentImage
from tree_rl.rollout.gateway.protocols.openai_responses.answers import answer, error_code, response
from tree_rl.rollout.gateway.protocols.openai_responses.requests import ResponsesRequest

PATH = "/responses"
MAX_LISTED = 100
MAX_STORED_BYTES = 32 << 20
"""Limit of the stored responses' requests. Clients that send whole conversations need no stored response."""


Stored = tuple[ResponsesRequest, asyncio.Task[Completion]]
"""A request and the task of its answer."""


class StoredResponses:
    """Responses, newest last. Drops the oldest beyond `MAX_STORED_BYTES`."""

    def __init__(self) -> None:
        self._responses: dict[str, Stored] = {}
        self._calls: dict[str, tuple[CalledTool, ...]] = {}
        self._num_bytes = 0

    def expect(self, request: ResponsesRequest, task: asyncio.Task[Completion]) -> None:
        """Store the answer to a request when it is ready, and a background response immediately."""
        if request.is_background:
            self._keep(request, task)
        # It is the task's first callback, so nobody reads the answer before it is stored.
        task.add_done_callback(partial(self.remember, request))

    def remember(self, request: ResponsesRequest, task: asyncio.Task[Completion]) -> None:
        """Store the tool calls of a task's answer, if it has one, and all of it if the client wants it stored."""
        if _is_answered(task):
            calls = task.result().choices[0].message.tool_calls
            self._calls.update((call.id, calls) for call in calls)
            if request.is_stored and not request.is_background:
                self._keep(request, task)

    def body(self, response_id: str) -> dict[str, Any]:
        """A response in its current state. Raises `RequestError` for an unknown response."""
        request, task = self._stored(response_id)
        if not task.done():
            return response(request, "in_progress")
        if task.cancelled():
            return response(request, "cancelled")
        if (cause := task.exception()) is not None:
            return response(request, "failed", error={"code": error_code(cause), "message": str(cause)})
        return answer(request, task.result())

    async def read(self, request: Request) -> dict[str, Any]:
        """`GET /v1/responses/{id}`."""
        if request.query_params.get("stream") == "true":
            raise RequestError("expected false: a stored response is read as a whole", field="stream")
        return self.body(request.path_params["response"])

    async def cancel(self, request: Request) -> dict[str, Any]:
        """`POST /v1/responses/{id}/cancel`: stop a background response, unless it is already complete."""
        stored, task = self._stored(request.path_params["response"])
        if not stored.is_background:
            raise RequestError("cannot cancel a response that was not created with background=true")
        task.cancel()
        await asyncio.wait({task})
        return self.body(request.path_params["response"])

    async def delete(self, request: Request) -> dict[str, Any]:
        """`DELETE /v1/responses/{id}`; a background response is stopped."""
        name = request.path_params["response"]
        self._stored(name)[1].cancel()
        self._forget(name)
        return {"id": name, "object": "response", "deleted": True}

    async def list_input_items(self, request: Request) -> dict[str, Any]:
        """`GET /v1/responses/{id}/input_items`: one page of `limit` items after the item `after`."""
        response_id = request.path_params["response"]
        sent = self._stored(response_id)[0].input_items
        items = [_whole(item, f"in_{response_id.removeprefix('resp_')}_{n}") for n, item in enumerate(sent)]
        if request.query_params.get("order", "desc") == "desc":
            items.reverse()
        after = request.query_params.get("after")
        names = [item["id"] for item in items]
        if after is not None and after not in names:
            raise RequestError(f"item with id {after[:80]!r} not found", field="after", status=404)
        limit = request.query_params.get("limit", "20")
        if limit not in [str(count) for count in range(1, MAX_LISTED + 1)]:
            raise wrong("limit", f"a whole number from 1 to {MAX_LISTED}", limit[:20])
        rest = items if after is None else items[names.index(after) + 1 :]
        page = rest[: int(limit)]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": len(page) < len(rest)}

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        # An item's id is KIND_RESPONSE or KIND_RESPONSE_NUMBER.
        response_id = f"resp_{item_id.partition('_')[2].partition('_')[0]}"
        items = self.body(response_id)["output"] if response_id in self._responses else ()
        return next((item for item in items if item["id"] == item_id), None)

    def calls_with(self, call_id: str) -> tuple[CalledTool, ...]:
        return self._calls.get(call_id, ())

    def conversation(self, response_id: str) -> tuple[tuple[ChatMessage, ...], Mapping[str, SentImage]]:
        try:
            request, task = self._stored(response_id)
        except RequestError as error:
            code = "previous_response_not_found"
            raise RequestError(str(error), field="previous_response_id", status=404, code=code) from error
        if not _is_answered(task):
            raise RequestError("expected an answered response", field="previous_response_id")
        return (*request.conversation, task.result().choices[0].message), request.images

    def _stored(self, response_id: str) -> Stored:
        stored = self._responses.get(response_id)
        if stored is None:
            raise RequestError(f"response with id {response_id[:80]!r} not found", status=404, code="not_found")
        return stored

    def _keep(self, request: ResponsesRequest, task: asyncio.Task[Completion]) -> None:
        self._responses[request.response_id] = request, task
        self._num_bytes += request.num_bytes
        while self._num_bytes > MAX_STORED_BYTES and len(self._responses) > 1:
            self._forget(next(iter(self._responses)))

    def _forget(self, response_id: str) -> None:
        self._num_bytes -= self._responses.pop(response_id)[0].num_bytes


def _is_answered(task: asyncio.Task[Completion]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _whole(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An input item, completed with the fields that clients may omit."""
    whole = {"id": name, "type": "message", **item}
    if whole["type"] == "message" and isinstance(whole.get("content"), str):
        kind = "output_text" if whole.get("role") == "assistant" else "input_text"
        whole["content"] = [{"type": kind, "text": whole["content"]}]
    return whole


Endpoint = Callable[[StoredResponses, Request], Awaitable[dict[str, Any]]]
ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", f"{PATH}/{{response}}", StoredResponses.read),
    ("DELETE", f"{PATH}/{{response}}", StoredResponses.delete),
    ("POST", f"{PATH}/{{response}}/cancel", StoredResponses.cancel),
    ("GET", f"{PATH}/{{response}}/input_items", StoredResponses.list_input_items),
)
"""Method, path below the API's address, and endpoint."""
