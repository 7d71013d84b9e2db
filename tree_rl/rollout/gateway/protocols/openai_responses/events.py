"""Streamed answers of the Responses API: typed events with sequence numbers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols import openai_chat
from tree_rl.rollout.gateway.protocols.exchange import Completion
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.openai_responses.answers import answer, error_code, response
from tree_rl.rollout.gateway.protocols.openai_responses.requests import ResponsesRequest

Event = tuple[str, dict[str, Any]]
"""An event's type without `response.`, and its fields."""


def stream(request: ResponsesRequest, completion: Completion) -> Iterator[bytes]:
    for number, (kind, body) in enumerate(_events(request, completion)):
        yield _written(f"response.{kind}", {**body, "sequence_number": number})


def error_event(request: ResponsesRequest, error: RequestError | BackendError) -> bytes:
    body = openai_chat.error_body(error)
    fields = {key: body["error"][key] for key in ("code", "message", "param")}
    failure = {"code": error_code(error), "message": str(error)}
    events = (
        ("response.created", {"response": response(request, "in_progress")}),
        # The API has these fields at the top level. OpenAI's SDK raises only if they are also in an object.
        ("error", {**fields, **body}),
        ("response.failed", {"response": response(request, "failed", error=failure)}),
    )
    return b"".join(_written(kind, {**more, "sequence_number": n}) for n, (kind, more) in enumerate(events))


def _events(request: ResponsesRequest, completion: Completion) -> Iterator[Event]:
    done = answer(request, completion)
    started = response(request, "in_progress")
    yield "created", {"response": started}
    yield "in_progress", {"response": started}
    for index, item in enumerate(done["output"]):
        place = {"item_id": item["id"], "output_index": index}
        yield "output_item.added", {"output_index": index, "item": _empty(item)}
        for kind, body in _parts(item):
            yield kind, {**place, **body}
        yield "output_item.done", {"output_index": index, "item": item}
    yield done["status"], {"response": done}


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item before its first delta."""
    fillings: dict[str, Any] = {"summary": [], "content": [], "arguments": "", "input": "", "status": "in_progress"}
    return {key: fillings.get(key, value) for key, value in item.items()}


def _parts(item: Mapping[str, Any]) -> Iterator[Event]:
    match item["type"]:
        case "reasoning":
            for index, part in enumerate(item["summary"]):
                yield from _part("reasoning_summary_part", "reasoning_summary_text", {"summary_index": index}, part)
            for index, part in enumerate(item["content"]):
                yield from _part("content_part", "reasoning_text", {"content_index": index}, part)
        case "message":
            for index, part in enumerate(item["content"]):
                yield from _part("content_part", "output_text", {"content_index": index}, part)
        case "function_call":
            yield "function_call_arguments.delta", {"delta": item["arguments"]}
            yield "function_call_arguments.done", {"arguments": item["arguments"]}
        case "custom_tool_call":
            yield "custom_tool_call_input.delta", {"delta": item["input"]}
            yield "custom_tool_call_input.done", {"input": item["input"]}


def _part(part_kind: str, text_kind: str, place: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[Event]:
    empty = {**part, "text": ""} | ({"logprobs": []} if "logprobs" in part else {})
    log_probs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield f"{part_kind}.added", {**place, "part": empty}
    yield f"{text_kind}.delta", {**place, "delta": part["text"], **log_probs}
    yield f"{text_kind}.done", {**place, "text": part["text"], **log_probs}
    yield f"{part_kind}.done", {**place, "part": part}


def _written(kind: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps({"type": kind, **body}, ensure_ascii=False).encode("utf-8", "replace")
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
