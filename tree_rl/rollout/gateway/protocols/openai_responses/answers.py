"""Answers of the Responses API: a response and its output items, or typed events with sequence numbers."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.event_stream import event
from tree_rl.rollout.gateway.protocols.exchange import Choice, Completion
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.messages import CalledTool
from tree_rl.rollout.gateway.protocols.openai_chat import error_body, shown_tokens
from tree_rl.rollout.gateway.protocols.openai_responses.requests import ResponsesRequest
from tree_rl.rollout.gateway.protocols.openai_responses.tools import OfferedTool, custom_input
from tree_rl.rollout.gateway.protocols.sealed_reasoning import seal

Event = tuple[str, dict[str, Any]]
"""An event's type without `response.`, and its fields."""
# Written by hand like chat completions; a test compares them with the SDK's types.


def answer(request: ResponsesRequest, completion: Completion) -> dict[str, Any]:
    (choice,) = completion.choices
    is_cut = choice.stop_cause == "length"
    return response(
        request,
        "incomplete" if is_cut else "completed",
        output=output_items(request, choice),
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        completed_at=None if is_cut else completion.created,
        usage=_usage(completion, choice),
    )


def token_count(num_tokens: int) -> dict[str, Any]:
    return {"input_tokens": num_tokens, "object": "response.input_tokens"}


def response(request: ResponsesRequest, status: str, **parts: Any) -> dict[str, Any]:
    """A response; `parts` override the values of one without an answer."""
    return {
        "id": request.response_id,
        "object": "response",
        "created_at": request.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "completed_at": None,
        "model": request.model,
        "output": [],
        **request.echo,
        "usage": None,
        **parts,
    }


def error_code(error: BaseException | None) -> str:
    """The API's code of the error that made a response fail."""
    if isinstance(error, RequestError):
        return error.code if error.code == "context_length_exceeded" else "invalid_prompt"
    is_busy = isinstance(error, BackendError) and error.status == HTTPStatus.TOO_MANY_REQUESTS
    return "rate_limit_exceeded" if is_busy else "server_error"


def output_items(request: ResponsesRequest, choice: Choice) -> list[dict[str, Any]]:
    """The reasoning, text and calls of a turn, in this order."""
    items = list(_items(request, choice))
    if choice.stop_cause == "length" and items[-1]["type"] != "custom_tool_call":
        items[-1]["status"] = "incomplete"
    return items


def _items(request: ResponsesRequest, choice: Choice) -> Iterator[dict[str, Any]]:
    message, name = choice.message, request.response_id.removeprefix("resp_")
    if message.reasoning is not None:
        summary = [{"text": message.reasoning, "type": "summary_text"}] if request.with_summary else []
        yield {
            "id": f"rs_{name}",
            "type": "reasoning",
            "summary": summary,
            "content": [{"text": message.reasoning, "type": "reasoning_text"}],
            "encrypted_content": seal(message.reasoning) if request.with_token else None,
            "status": "completed",
        }
    if message.content or not message.tool_calls:
        text = {
            "type": "output_text",
            "text": message.content,
            "annotations": [],
            "logprobs": shown_tokens(choice, unknown=[]),
        }
        body: dict[str, Any] = {"role": "assistant", "status": "completed", "content": [text]}
        yield {"id": f"msg_{name}", "type": "message", **body}
    for index, call in enumerate(message.tool_calls):
        yield _call(request, call, f"{name}_{index}")


def _call(request: ResponsesRequest, call: CalledTool, name: str) -> dict[str, Any]:
    tool = request.offered.get(call.name) or OfferedTool(kind="function_call", name=call.name)
    called = {"type": tool.kind, "call_id": call.id, "name": tool.name}
    if tool.namespace is not None:
        called["namespace"] = tool.namespace
    if tool.kind == "custom_tool_call":
        return {"id": f"ctc_{name}", **called, "input": custom_input(call)}
    return {"id": f"fc_{name}", **called, "arguments": call.arguments_json, "status": "completed"}


def _usage(completion: Completion, choice: Choice) -> dict[str, Any]:
    prompt, generated = completion.prompt_tokens, completion.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens or 0},
        "total_tokens": prompt + generated,
    }


def stream(request: ResponsesRequest, completion: Completion) -> Iterator[bytes]:
    for number, (kind, body) in enumerate(_events(request, completion)):
        yield event({**body, "sequence_number": number}, f"response.{kind}")


def error_event(request: ResponsesRequest, error: RequestError | BackendError) -> bytes:
    body = error_body(error)
    fields = {key: body["error"][key] for key in ("code", "message", "param")}
    failure = {"code": error_code(error), "message": str(error)}
    events = (
        ("response.created", {"response": response(request, "in_progress")}),
        # The API has these fields at the top level. OpenAI's SDK raises only if they are also in an object.
        ("error", {**fields, **body}),
        ("response.failed", {"response": response(request, "failed", error=failure)}),
    )
    return b"".join(event({**more, "sequence_number": n}, kind) for n, (kind, more) in enumerate(events))


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
    for index, part in enumerate(item.get("summary", ())):
        yield from _part("reasoning_summary_part", "reasoning_summary_text", {"summary_index": index}, part)
    for index, part in enumerate(item.get("content", ())):
        yield from _part("content_part", part["type"], {"content_index": index}, part)
    for key in item.keys() & {"arguments", "input"}:
        yield f"{item['type']}_{key}.delta", {"delta": item[key]}
        yield f"{item['type']}_{key}.done", {key: item[key]}


def _part(part_kind: str, text_kind: str, place: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[Event]:
    empty = {**part, "text": ""} | ({"logprobs": []} if "logprobs" in part else {})
    log_probs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield f"{part_kind}.added", {**place, "part": empty}
    yield f"{text_kind}.delta", {**place, "delta": part["text"], **log_probs}
    yield f"{text_kind}.done", {**place, "text": part["text"], **log_probs}
    yield f"{part_kind}.done", {**place, "part": part}
