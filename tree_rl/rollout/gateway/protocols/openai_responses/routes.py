"""Endpoints of stored responses: read, list input items, cancel, delete."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from tree_rl.rollout.gateway.protocols.fields import RequestError, wrong
from tree_rl.rollout.gateway.protocols.openai_responses.store import StoredResponses

PATH = "/responses"
MAX_LISTED = 100
Endpoint = Callable[[StoredResponses, Request], Awaitable[dict[str, Any]]]


async def read(stored: StoredResponses, request: Request) -> dict[str, Any]:
    """`GET /v1/responses/{id}`."""
    if request.query_params.get("stream") == "true":
        raise RequestError("expected false: a stored response is read as a whole", field="stream")
    return stored.body(request.path_params["response"])


async def delete(stored: StoredResponses, request: Request) -> dict[str, Any]:
    """`DELETE /v1/responses/{id}`."""
    name = request.path_params["response"]
    stored.delete(name)
    return {"id": name, "object": "response", "deleted": True}


async def cancel(stored: StoredResponses, request: Request) -> dict[str, Any]:
    """`POST /v1/responses/{id}/cancel`."""
    return await stored.cancel(request.path_params["response"])


async def list_input_items(stored: StoredResponses, request: Request) -> dict[str, Any]:
    """`GET /v1/responses/{id}/input_items`: one page of `limit` items after the item `after`."""
    items = stored.input_items(request.path_params["response"])
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


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", f"{PATH}/{{response}}", read),
    ("DELETE", f"{PATH}/{{response}}", delete),
    ("POST", f"{PATH}/{{response}}/cancel", cancel),
    ("GET", f"{PATH}/{{response}}/input_items", list_input_items),
)
"""Method, path below the API's address, and endpoint."""
