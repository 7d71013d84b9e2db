"""OpenAI's Chat Completions API. Answers equal those that OpenAI's SDK serializes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from openai.types import Model
from openai.types.chat import ChatCompletionChunk

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.demands import read_json_format, tools_to_call
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Choice, Completion
from tree_rl.rollout.gateway.protocols.fields import MAX_INTEGER, Fields, RequestError, check_stop_texts, wrong
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage, read_arguments, unseen
from tree_rl.rollout.gateway.protocols.request_fields import CHAT_FIELDS, check_fields

PATH = "/chat/completions"
PING = b": ping\n\n"
END = b"data: [DONE]\n\n"
MAX_CHOICES = 128
UNSEEN_PARTS = {"image_url": "image", "input_audio": "sound", "video_url": "video", "file": "file"}
"""Names of the parts that a text model cannot read, by their type."""
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def read_request(body: Any) -> ChatRequest:
    """Read the body of `POST /v1/chat/completions`."""
    fields = Fields(body)
    left_out = [*check_fields(fields, CHAT_FIELDS)]
    tools, must_call = _tools(fields)
    stop = fields.raw("stop")
    stop_texts = [stop] if isinstance(stop, str) else fields.items("stop")
    check_stop_texts("stop", stop_texts)
    limit = fields.integer("max_completion_tokens", None, low=1) or fields.integer("max_tokens", None, low=1)
    messages = tuple(_message(message, left_out) for message in fields.objects("messages", required=True))
    if not messages:
        raise wrong("messages", "at least one message", [])
    stream_options = fields.child("stream_options") if fields.raw("stream_options") is not None else Fields({})
    continues = fields.flag("continue_final_message")
    if continues and messages[-1].role != "assistant":
        raise wrong("continue_final_message", "a last message of role assistant", messages[-1].role)
    return ChatRequest(
        model=fields.text("model", "default"),
        messages=messages,
        tools=tools,
        must_call=must_call,
        one_call=fields.raw("parallel_tool_calls") is not None and not fields.flag("parallel_tool_calls"),
        json=read_json_format(fields.child("response_format")) if fields.raw("response_format") else None,
        continues_last=continues,
        count=fields.integer("n", 1, low=1, high=MAX_CHOICES) or 1,
        max_tokens=limit,
        stop=tuple(stop_texts),
        sampling=_sampling(fields),
        is_stream=fields.flag("stream"),
        with_usage=stream_options.flag("include_usage"),
        with_log_probs=fields.flag("logprobs"),
        left_out=tuple(dict.fromkeys(left_out)),
    )


def answer(request: ChatRequest, completion: Completion) -> dict[str, Any]:
    head = _head(request, completion, "chat.completion")
    # Written by hand in the order of the SDK's type; a test compares the two.
    return {
        "id": head["id"],
        "choices": [
            {
                "finish_reason": _finish_reason(choice),
                "index": index,
                "logprobs": _log_probs(choice),
                "message": _answered(choice.message),
            }
            for index, choice in enumerate(completion.choices)
        ],
        "created": head["created"],
        "model": head["model"],
        "object": head["object"],
        "usage": _usage(completion),
    }


def stream(request: ChatRequest, completion: Completion) -> Iterator[bytes]:
    for index, choice in enumerate(completion.choices):
        for delta, log_probs in _deltas(choice):
            yield _chunk(request, completion, [{"index": index, "delta": delta, "logprobs": log_probs}])
        final = {"index": index, "delta": {}, "finish_reason": _finish_reason(choice)}
        yield _chunk(request, completion, [final])
    if request.with_usage:
        yield _chunk(request, completion, [], usage=_usage(completion))
    yield END


def error_body(error: RequestError | BackendError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    field, code = (error.field, error.code) if isinstance(error, RequestError) else (None, "model_server")
    return {"error": {"message": str(error), "type": kind, "param": field, "code": code}}


def error_event(request: ChatRequest, error: RequestError | BackendError) -> bytes:
    return _event(error_body(error))


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> dict[str, Any]:
    return Model(id=name, created=0, object="model", owned_by="tree_rl").model_dump(mode="json")


def _message(fields: Fields, left_out: list[str]) -> ChatMessage:
    role = fields.text("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise wrong(fields.name("role"), "system, developer, user, assistant or tool", role)
    content = _text(fields, left_out)
    if role != "assistant":
        call = fields.text("tool_call_id", "") if role == "tool" else ""
        return ChatMessage(role=role, content=content, tool_call_id=call or None, name=fields.text("name", "") or None)
    reasoning = fields.raw("reasoning_content") or fields.raw("reasoning") or None
    if not isinstance(reasoning, str | None):
        raise wrong(fields.name("reasoning_content"), "a string", reasoning)
    calls = tuple(_called_tool(call) for call in fields.objects("tool_calls"))
    return ChatMessage(role=role, content=content, reasoning=reasoning, tool_calls=calls)


def _text(fields: Fields, left_out: list[str]) -> str:
    content = fields.raw("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in fields.objects("content", required=True):
        kind = part.text("type")
        if kind in UNSEEN_PARTS:
            left_out.append(UNSEEN_PARTS[kind])
            named = part.child("file").text("filename", "") if kind == "file" else ""
            parts.append(unseen(UNSEEN_PARTS[kind], named))
        elif kind in ("text", "refusal"):
            parts.append(part.text(kind))
        else:
            raise RequestError(f"expected text, received a part of type {kind!r}", field=part.name("type"))
    return "\n".join(parts)


def _called_tool(fields: Fields) -> CalledTool:
    function = fields.child("function")
    arguments = function.raw("arguments")
    if not isinstance(arguments, dict):
        arguments = read_arguments(function.text("arguments", "{}") or "{}")
    return CalledTool(id=fields.text("id", ""), name=function.text("name"), arguments=arguments)


def _tool(fields: Fields) -> Mapping[str, Any]:
    if fields.text("type", "function") != "function":
        raise wrong(fields.name("type"), "function", fields.raw("type"))
    function = fields.child("function")
    function.text("name")
    return {"type": "function", "function": dict(fields.raw("function"))}


def _tools(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    tools = tuple(_tool(tool) for tool in fields.objects("tools"))
    choice = fields.raw("tool_choice")
    if choice is None or choice == "auto":
        return tools, ()
    if choice == "none":
        return (), ()
    if choice == "required":
        return tools, tools_to_call(tools, named=None, field="tool_choice")
    if not isinstance(choice, dict):
        raise wrong("tool_choice", "none, auto, required or an object that names a tool", choice)
    asked = fields.child("tool_choice")
    kind = asked.text("type")
    if kind == "function":
        named = asked.child("function").text("name")
        return tools, tools_to_call(tools, named=named, field="tool_choice.function.name")
    if kind != "allowed_tools":
        raise wrong("tool_choice.type", "function or allowed_tools", kind)
    allowed = asked.child("allowed_tools")
    names = [_tool(tool)["function"]["name"] for tool in allowed.objects("tools", required=True)]
    for name in names:
        tools_to_call(tools, named=name, field="tool_choice.allowed_tools.tools")
    kept = tuple(tool for tool in tools if tool["function"]["name"] in names)
    is_required = allowed.text("mode") == "required"
    return kept, tools_to_call(kept, named=None, field="tool_choice") if is_required else ()


def _sampling(fields: Fields) -> dict[str, Any]:
    bounds = {
        "temperature": (0.0, 2.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "repetition_penalty": (0.0, 10.0),
    }
    numbers: dict[str, Any] = {key: fields.number(key, low=low, high=high) for key, (low, high) in bounds.items()}
    numbers["top_k"] = fields.integer("top_k", None, low=-1, high=MAX_INTEGER)
    numbers["seed"] = fields.integer("seed", None, low=-(2**63), high=2**63 - 1)
    return {key: value for key, value in numbers.items() if value is not None}


def _head(request: ChatRequest, completion: Completion, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{completion.id}", "created": completion.created, "model": request.model, "object": kind}


def _answered(message: ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"content": message.content or (None if message.tool_calls else ""), "role": "assistant"}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "function": {"arguments": call.arguments_json, "name": call.name}, "type": "function"}
            for call in message.tool_calls
        ]
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    return body


def _deltas(choice: Choice) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    message = choice.message
    yield {"role": "assistant", "content": ""}, None
    if message.reasoning is not None:
        yield {"reasoning_content": message.reasoning}, None
    yield {"content": message.content}, _log_probs(choice)
    for index, call in enumerate(message.tool_calls):
        empty = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        yield {"tool_calls": [empty]}, None
        yield {"tool_calls": [{"index": index, "function": {"arguments": call.arguments_json}}]}, None


def _finish_reason(choice: Choice) -> str:
    return "stop" if choice.stop_cause == "stop_sequence" else choice.stop_cause


def _log_probs(choice: Choice) -> dict[str, Any] | None:
    if choice.tokens is None:
        return None
    content = [
        {"token": text, "bytes": _bytes(text), "logprob": log_prob, "top_logprobs": []}
        for text, log_prob in choice.tokens
    ]
    return {"content": content, "refusal": None}


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token; None if it ends inside a character, as its bytes are unknown."""
    return None if "\ufffd" in text else list(text.encode())


def _usage(completion: Completion) -> dict[str, int]:
    prompt, generated = completion.prompt_tokens, completion.completion_tokens
    return {"completion_tokens": generated, "prompt_tokens": prompt, "total_tokens": prompt + generated}


def _chunk(request: ChatRequest, completion: Completion, choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = _head(request, completion, "chat.completion.chunk")
    made = ChatCompletionChunk.model_validate(
        {**head, "choices": [{"finish_reason": None, **choice} for choice in choices], **more}
    )
    return _event(made.model_dump(mode="json", exclude_unset=True))


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
