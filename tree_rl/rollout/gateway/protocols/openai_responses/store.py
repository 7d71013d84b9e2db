"""The responses of one session, for `previous_response_id`, item references and later reading."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tree_rl.rollout.gateway.protocols.exchange import Completion
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.protocols.openai_responses.answers import answer, error_code, response
from tree_rl.rollout.gateway.protocols.openai_responses.requests import ResponsesRequest

MAX_STORED_BYTES = 32 << 20
"""Bytes of the requests whose responses are kept. Clients that send whole conversations need none of them again."""


@dataclass(kw_only=True, slots=True)
class _Stored:
    request: ResponsesRequest
    task: asyncio.Task[Completion] | None = None
    """Task of a response in the background."""
    completion: Completion | None = None


class StoredResponses:
    """Responses, newest last. The oldest are forgotten beyond `MAX_STORED_BYTES`."""

    def __init__(self) -> None:
        self._responses: dict[str, _Stored] = {}
        self._items: dict[str, Mapping[str, Any]] = {}
        self._calls: dict[str, tuple[CalledTool, ...]] = {}
        self._num_bytes = 0

    def expect(self, request: ResponsesRequest, task: asyncio.Task[Completion]) -> None:
        """Remember the answer to a request once it is there; one in the background is stored from now on."""
        if request.is_background:
            self._keep(_Stored(request=request, task=task))
        # Nobody reads an answer before this: it is the task's first callback.
        task.add_done_callback(lambda done: self._finish(request, done))

    def remember(self, request: ResponsesRequest, completion: Completion) -> None:
        """Remember an answer: its tool calls, and all of it if the client wants it stored."""
        calls = completion.choices[0].message.tool_calls
        self._calls.update((call.id, calls) for call in calls)
        if request.is_stored and not request.is_background:
            self._keep(_Stored(request=request))
        stored = self._responses.get(request.response_id)
        if stored is not None:
            stored.completion = completion
            self._items.update((item["id"], item) for item in answer(request, completion)["output"])

    def body(self, response_id: str) -> dict[str, Any]:
        """A response as it stands. Raises `RequestError` for an unknown one."""
        stored = self._stored(response_id)
        if stored.completion is not None:
            return answer(stored.request, stored.completion)
        if stored.task is None or not stored.task.done():
            return response(stored.request, "in_progress")
        if stored.task.cancelled():
            return response(stored.request, "cancelled")
        cause = stored.task.exception()
        error = {"code": error_code(cause), "message": str(cause)}
        return response(stored.request, "failed", error=error)

    async def cancel(self, response_id: str) -> dict[str, Any]:
        """Stop a response in the background. One that is done stays as it is."""
        stored = self._stored(response_id)
        if stored.task is None:
            raise RequestError("cannot cancel a response that was not created with background=true")
        stored.task.cancel()
        await asyncio.wait({stored.task})
        return self.body(response_id)

    def delete(self, response_id: str) -> None:
        """Forget a response. One in the background is stopped."""
        stored = self._stored(response_id)
        if stored.task is not None:
            stored.task.cancel()
        self._forget(response_id)

    def input_items(self, response_id: str) -> list[dict[str, Any]]:
        """What a response was asked with, oldest first."""
        items = self._stored(response_id).request.input_items
        return [_whole(item, f"in_{response_id.removeprefix('resp_')}_{n}") for n, item in enumerate(items)]

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        """An output item of a stored response."""
        return self._items.get(item_id)

    def calls_with(self, call_id: str) -> tuple[CalledTool, ...]:
        """All tool calls of the turn that made this one; empty for a call of others."""
        return self._calls.get(call_id, ())

    def conversation(self, response_id: str) -> tuple[ChatMessage, ...]:
        """The messages up to a stored response, its own included. Raises `RequestError` for an unknown one."""
        try:
            stored = self._stored(response_id)
        except RequestError as error:
            code = "previous_response_not_found"
            raise RequestError(str(error), field="previous_response_id", status=404, code=code) from error
        if stored.completion is None:
            raise RequestError("expected an answered response", field="previous_response_id")
        return (*stored.request.conversation, stored.completion.choices[0].message)

    def _stored(self, response_id: str) -> _Stored:
        stored = self._responses.get(response_id)
        if stored is None:
            raise RequestError(f"response with id {response_id[:80]!r} not found", status=404, code="not_found")
        return stored

    def _finish(self, request: ResponsesRequest, task: asyncio.Task[Completion]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.remember(request, task.result())

    def _keep(self, stored: _Stored) -> None:
        self._responses[stored.request.response_id] = stored
        self._num_bytes += stored.request.num_bytes
        while self._num_bytes > MAX_STORED_BYTES and len(self._responses) > 1:
            self._forget(next(iter(self._responses)))

    def _forget(self, response_id: str) -> None:
        stored = self._responses.pop(response_id)
        self._num_bytes -= stored.request.num_bytes
        if stored.completion is not None:
            for item in answer(stored.request, stored.completion)["output"]:
                self._items.pop(item["id"], None)


def _whole(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An input item with the fields that clients may leave out."""
    whole = {"id": name, "type": "message", **item}
    if whole["type"] == "message" and isinstance(whole.get("content"), str):
        kind = "output_text" if whole.get("role") == "assistant" else "input_text"
        whole["content"] = [{"type": kind, "text": whole["content"]}]
    return whole
