"""Anthropic's Messages API. Answers equal those that Anthropic's SDK serializes."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.demands import described, read_json_format, tools_to_call
from tree_rl.rollout.gateway.protocols.event_stream import event
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Choice, Completion
from tree_rl.rollout.gateway.protocols.fields import MAX_INTEGER, Fields, RequestError, wrong
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage, Media
from tree_rl.rollout.gateway.protocols.request_fields import MESSAGE_FIELDS, check_fields

PATH = "/messages"
SAMPLING = {"temperature": (0.0, 1.0), "top_p": (0.0, 1.0), "top_k": (0, MAX_INTEGER)}
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "stop_sequence": "stop_sequence"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def read_request(body: Any) -> ChatRequest:
    """Read the body of `POST /v1/messages`."""
    fields = Fields(body)
    max_tokens = fields.number("max_tokens", low=1)
    if max_tokens is None:
        raise wrong("max_tokens", "a whole number of at least 1", None)
    return _request(fields, max_tokens=max_tokens)


def read_count_request(body: Any) -> ChatRequest:
    """Read the body of `POST /v1/messages/count_tokens`."""
    return _request(Fields(body), max_tokens=None)


def answer(request: ChatRequest, completion: Completion) -> dict[str, Any]:
    (choice,) = completion.choices
    content = list(_blocks(choice.message))
    return _message(request, completion, content=content, choice=choice)


def stream(request: ChatRequest, completion: Completion) -> Iterator[bytes]:
    (choice,) = completion.choices
    started = _message(request, completion, content=[], choice=None)
    yield event({"message": started}, "message_start")
    for index, block in enumerate(_blocks(choice.message)):
        empty, deltas = _parts(block)
        yield event({"index": index, "content_block": empty}, "content_block_start")
        for delta in deltas:
            yield event({"index": index, "delta": delta}, "content_block_delta")
        yield event({"index": index}, "content_block_stop")
    reason = {"stop_reason": STOP_REASONS[choice.stop_cause], "stop_sequence": choice.stop_sequence}
    yield event({"delta": reason, "usage": {"output_tokens": completion.completion_tokens}}, "message_delta")
    yield event({}, "message_stop")


def token_count(num_tokens: int) -> dict[str, Any]:
    return {"input_tokens": num_tokens}


def error_body(error: RequestError | BackendError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": kind, "message": str(error)}
    if isinstance(error, RequestError) and error.field == "thread":
        # The SDK's tool runner reads this, and then sends whole conversations.
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body}


def error_event(request: ChatRequest, error: RequestError | BackendError) -> bytes:
    return event(error_body(error), "error")


def models(name: str) -> dict[str, Any]:
    return {"data": [model(name)], "has_more": False, "first_id": name, "last_id": name}


def model(name: str) -> dict[str, Any]:
    return {"id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z", "type": "model"}


def _request(fields: Fields, *, max_tokens: int | None) -> ChatRequest:
    media = Media(check_fields(fields, MESSAGE_FIELDS))
    choice = fields.part("tool_choice")
    system = _texts(fields, "system", media)
    messages = _read_messages(fields.objects("messages", required=True), media)
    if not messages:
        raise wrong("messages", "at least one message", [])
    if system:
        messages.insert(0, ChatMessage(role="system", content=system))
    tools, must_call = _tools(fields, choice)
    return ChatRequest(
        model=fields.text("model", "default"),
        messages=tuple(messages),
        tools=tools,
        must_call=must_call,
        one_call=choice.flag("disable_parallel_tool_use"),
        json=read_json_format(fields.part("output_config"), "format") or read_json_format(fields, "output_format"),
        continues_last=messages[-1].role == "assistant",
        max_tokens=max_tokens,
        stop=fields.stop_texts("stop_sequences"),
        sampling=fields.numbers(SAMPLING),
        is_stream=fields.flag("stream"),
        left_out=tuple(dict.fromkeys(media.left_out)),
        images=media.images,
    )


def _tools(fields: Fields, choice: Fields) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    tools = tuple(_tool(tool) for tool in fields.objects("tools"))
    kind = choice.text("type", "auto" if fields.raw("tool_choice") is None else None)
    if kind not in ("auto", "none", "any", "tool"):
        raise wrong("tool_choice.type", "auto, any, tool or none", kind)
    if kind in ("auto", "none"):
        return (tools if kind == "auto" else ()), ()
    named = choice.text("name") if kind == "tool" else None
    return tools, tools_to_call(tools, named=named, field="tool_choice")


def _texts(fields: Fields, key: str, media: Media) -> str:
    """The texts of a field, empty if it is absent."""
    return "" if fields.raw(key) is None else "\n".join(_shown(block, media) for block in _read_blocks(fields, key))


def _read_blocks(fields: Fields, key: str) -> list[Fields]:
    """The blocks of a field; a text is one block."""
    text = fields.raw(key)
    if isinstance(text, str):
        return [Fields({"type": "text", "text": text}, fields.name(key))]
    return fields.objects(key, required=True)


def _shown(block: Fields, media: Media) -> str:
    """The text for the model of a block from a user or a tool."""
    kind = block.text("type")
    if kind == "text":
        return block.text("text")
    if kind in ("document", "search_result"):
        # A search result has its origin in `source` and its text in `content`.
        holder = block.child("source") if kind == "document" else block
        for key in ("content", "data") if holder.raw("type") in ("content", "text", "search_result") else ():
            if holder.raw(key) is not None:
                return _texts(holder, key, media)
    if kind not in ("document", "image", "tool_reference"):
        raise RequestError(
            f"expected text, image, document or tool_result, received {kind!r}", field=block.name("type")
        )
    source = block.part("source") if kind == "image" else Fields({})
    url = source.text("url", "") or source.text("file_id", "")
    if source.raw("data") is not None:
        url = f"data:{source.text('media_type', '')};base64,{source.text('data')}"
    name = block.text("title", "") or block.text("tool_name", "")
    return media.shown(kind, name, url=url, field=block.name("source"))


def _read_messages(objects: Iterable[Fields], media: Media) -> list[ChatMessage]:
    """Read the field `messages`. Joins an assistant's consecutive messages, as Anthropic does."""
    messages: list[ChatMessage] = []
    for role, group in groupby(objects, key=_role):
        if role == "assistant":
            messages.append(_assistant([block for message in group for block in _read_blocks(message, "content")]))
        else:
            messages += [one for message in group for one in _given(role, _read_blocks(message, "content"), media)]
    return messages


def _role(fields: Fields) -> str:
    role = fields.text("role")
    if role not in ("user", "assistant", "system"):
        raise wrong(fields.name("role"), "user or assistant", role)
    return role


def _assistant(blocks: list[Fields]) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[CalledTool] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            arguments = block.raw("input")
            if not isinstance(arguments, dict):
                raise wrong(block.name("input"), "a JSON object", arguments)
            calls.append(CalledTool(id=block.text("id", ""), name=block.text("name"), arguments=arguments))
        elif kind != "redacted_thinking":
            raise RequestError(f"expected text, thinking or tool_use, received {kind!r}", field=block.name("type"))
    reasoning = "\n".join(thoughts) or None
    return ChatMessage(role="assistant", content="\n".join(texts), reasoning=reasoning, tool_calls=tuple(calls))


def _given(role: str, blocks: list[Fields], media: Media) -> list[ChatMessage]:
    """Tool results become separate messages before the user's text."""
    results = [
        ChatMessage(role="tool", content=_texts(block, "content", media), tool_call_id=block.text("tool_use_id"))
        for block in blocks
        if block.text("type") == "tool_result"
    ]
    texts = [_shown(block, media) for block in blocks if block.text("type") != "tool_result"]
    return [*results, ChatMessage(role=role, content="\n".join(texts))] if texts or not results else results


def _tool(fields: Fields) -> Mapping[str, Any]:
    if fields.raw("type") not in (None, "custom"):
        raise RequestError(
            f"expected a tool with an input_schema, received the built-in {fields.raw('type')!r}",
            field=fields.name("type"),
        )
    if fields.raw("input_schema") is None:
        raise wrong(fields.name("input_schema"), "a JSON schema", None)
    return {"type": "function", "function": described(fields, fields.raw("input_schema"), field="input_schema")}


def _message(
    request: ChatRequest, completion: Completion, *, content: list[dict[str, Any]], choice: Choice | None
) -> dict[str, Any]:
    return {
        "id": f"msg_{completion.id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": None if choice is None else STOP_REASONS[choice.stop_cause],
        "stop_sequence": None if choice is None else choice.stop_sequence,
        "usage": {
            "input_tokens": completion.prompt_tokens,
            "output_tokens": 0 if choice is None else completion.completion_tokens,
        },
    }


def _blocks(message: ChatMessage) -> Iterator[dict[str, Any]]:
    if message.reasoning is not None:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": ""}
    if message.content or not message.tool_calls:
        yield {"type": "text", "text": message.content}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The empty block that starts a block's stream, and the deltas that fill it."""
    if block["type"] == "thinking":
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
