"""OpenAI's Chat Completions API. Answers equal those that OpenAI's SDK serializes."""

from collections.abc import Iterator, Mapping
from typing import Any

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.demands import chosen_tools, read_json_format
from tree_rl.rollout.gateway.protocols.event_stream import event
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest, Choice, Completion
from tree_rl.rollout.gateway.protocols.fields import MAX_INTEGER, Fields, RequestError, wrong
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage, Media, read_arguments
from tree_rl.rollout.gateway.protocols.request_fields import CHAT_FIELDS, check_fields

PATH = "/chat/completions"
PING = b": ping\n\n"
END = b"data: [DONE]\n\n"
MAX_CHOICES = 128
SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
    "top_k": (-1, MAX_INTEGER),
    "seed": (-(2**63), 2**63 - 1),
}
UNSEEN_PARTS = {
    "image_url": "image",
    "input_audio": "sound",
    "video_url": "video",
    "file": "file",
    "input_image": "image",
    "input_file": "file",
}
"""Names of the parts that a text model cannot read, by their type, here and in the Responses API."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Keys of the texts, by the type of their part."""
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def read_request(body: Any) -> ChatRequest:
    """Read the body of `POST /v1/chat/completions`."""
    fields = Fields(body)
    media = Media(check_fields(fields, CHAT_FIELDS))
    tools, must_call = chosen_tools(fields, tuple(_tool(tool) for tool in fields.objects("tools")))
    limit = fields.number("max_completion_tokens", low=1) or fields.number("max_tokens", low=1)
    messages = tuple(_message(message, media) for message in fields.objects("messages", required=True))
    if not messages:
        raise wrong("messages", "at least one message", [])
    continues = fields.flag("continue_final_message")
    if continues and messages[-1].role != "assistant":
        raise wrong("continue_final_message", "a last message of role assistant", messages[-1].role)
    return ChatRequest(
        model=fields.text("model", "default"),
        messages=messages,
        tools=tools,
        must_call=must_call,
        one_call=not fields.flag("parallel_tool_calls", default=True),
        json=read_json_format(fields, "response_format"),
        continues_last=continues,
        count=fields.number("n", low=1, high=MAX_CHOICES) or 1,
        max_tokens=limit,
        stop=fields.stop_texts("stop"),
        sampling=fields.numbers(SAMPLING),
        is_stream=fields.flag("stream"),
        with_usage=fields.part("stream_options").flag("include_usage"),
        with_log_probs=fields.flag("logprobs"),
        left_out=tuple(dict.fromkeys(media.left_out)),
        images=media.images,
    )


def answer(request: ChatRequest, completion: Completion) -> dict[str, Any]:
    return {
        **_head(request, completion, "chat.completion"),
        "choices": [
            {
                "finish_reason": _finish_reason(choice),
                "index": index,
                "logprobs": _log_probs(choice),
                "message": _answered(choice.message),
            }
            for index, choice in enumerate(completion.choices)
        ],
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
    return event(error_body(error))


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> dict[str, Any]:
    return {"id": name, "created": 0, "object": "model", "owned_by": "tree_rl"}


def _message(fields: Fields, media: Media) -> ChatMessage:
    role = fields.text("role")
    if role == "developer":
        role = "system"
    if role not in ("system", "user", "assistant", "tool"):
        raise wrong(fields.name("role"), "system, developer, user, assistant or tool", role)
    content = "" if fields.raw("content") is None else text_of(fields, "content", media)
    if role != "assistant":
        call = fields.text("tool_call_id", "") if role == "tool" else ""
        return ChatMessage(role=role, content=content, tool_call_id=call or None, name=fields.text("name", "") or None)
    reasoning = fields.raw("reasoning_content") or fields.raw("reasoning") or None
    if not isinstance(reasoning, str | None):
        raise wrong(fields.name("reasoning_content"), "a string", reasoning)
    calls = tuple(_called_tool(call) for call in fields.objects("tool_calls"))
    return ChatMessage(role=role, content=content, reasoning=reasoning, tool_calls=calls)


def text_of(fields: Fields, key: str, media: Media) -> str:
    """A text, or the texts of a list of parts; `media` receives other parts."""
    content = fields.raw(key)
    if isinstance(content, str):
        return content
    texts = []
    for part in fields.objects(key, required=True):
        kind = part.text("type")
        if kind in UNSEEN_PARTS:
            name = part.text("filename", "") or part.part("file").text("filename", "")
            given = part.raw("image_url")
            url = given.get("url") if isinstance(given, Mapping) else given or part.raw("file_id")
            field = part.name("image_url")
            texts.append(media.shown(UNSEEN_PARTS[kind], name, url=url if isinstance(url, str) else "", field=field))
        elif kind in TEXT_PARTS:
            texts.append(part.text(TEXT_PARTS[kind]))
        else:
            raise RequestError(f"expected text, received a part of type {kind[:80]!r}", field=part.name("type"))
    return "\n".join(texts)


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
    return None if choice.tokens is None else {"content": shown_tokens(choice, unknown=None), "refusal": None}


def shown_tokens(choice: Choice, *, unknown: list[int] | None) -> list[dict[str, Any]]:
    """The tokens with their log-probs. `unknown`: bytes of a token that ends inside a character."""
    return [
        {
            "token": text,
            "bytes": unknown if "\ufffd" in text else list(text.encode()),
            "logprob": value,
            "top_logprobs": [],
        }
        for text, value in choice.tokens or ()
    ]


def _usage(completion: Completion) -> dict[str, int]:
    prompt, generated = completion.prompt_tokens, completion.completion_tokens
    return {"completion_tokens": generated, "prompt_tokens": prompt, "total_tokens": prompt + generated}


def _chunk(request: ChatRequest, completion: Completion, choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = _head(request, completion, "chat.completion.chunk")
    return event({**head, "choices": [{"finish_reason": None, **choice} for choice in choices], **more})
