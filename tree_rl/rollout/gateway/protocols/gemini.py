"""Gemini's API: `generateContent`, `streamGenerateContent` and `countTokens`.

Like Google's servers, we read names in camel case and in snake case.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.protocols.demands import ANY_OBJECT, JsonDemand, described, tools_to_call
from tree_rl.rollout.gateway.protocols.event_stream import event, json_bytes
from tree_rl.rollout.gateway.protocols.exchange import EVENTS, ChatRequest, Choice, Completion
from tree_rl.rollout.gateway.protocols.fields import MAX_INTEGER, Fields, RequestError, wrong
from tree_rl.rollout.gateway.protocols.gemini_contents import plain_schema, read_contents, text_of_parts
from tree_rl.rollout.gateway.protocols.messages import ChatMessage, Media
from tree_rl.rollout.gateway.protocols.request_fields import (
    NO_EFFECT,
    NOT_SUPPORTED,
    READ,
    FieldTreatment,
    check_fields,
)
from tree_rl.rollout.gateway.protocols.sealed_reasoning import seal

METHODS = {"generateContent": False, "streamGenerateContent": True}
"""Methods, and True for those that stream."""
KEY_HEADER = "x-goog-api-key"
KNOWN: Mapping[str, FieldTreatment] = {
    **dict.fromkeys(("contents", "generationConfig", "model", "systemInstruction", "toolConfig", "tools"), READ),
    # The gateway does not filter, bill or store answers.
    **dict.fromkeys(("labels", "safetySettings", "serviceTier", "store"), NO_EFFECT),
    "cachedContent": NOT_SUPPORTED,
}
KNOWN_CONFIG: Mapping[str, FieldTreatment] = {
    **dict.fromkeys(("candidateCount", "frequencyPenalty", "maxOutputTokens", "presencePenalty"), READ),
    **dict.fromkeys(("responseJsonSchema", "responseMimeType", "responseModalities", "responseSchema", "seed"), READ),
    **dict.fromkeys(("stopSequences", "temperature", "thinkingConfig", "topK", "topP"), READ),
    **dict.fromkeys(("audioTimestamp", "enableAffectiveDialog", "enableEnhancedCivicAnswers"), NO_EFFECT),
    **dict.fromkeys(("mediaResolution", "modelSelectionConfig", "routingConfig"), NO_EFFECT),
    **dict.fromkeys(("audioTranscriptionConfig", "imageConfig", "logprobs", "responseFormat"), NOT_SUPPORTED),
    **dict.fromkeys(("responseLogprobs", "speechConfig", "translationConfig"), NOT_SUPPORTED),
}
SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "topP": (0.0, 1.0),
    "topK": (0.0, MAX_INTEGER),
    "presencePenalty": (-2.0, 2.0),
    "frequencyPenalty": (-2.0, 2.0),
    "seed": (-(2**63), 2**63 - 1),
}
MAX_CANDIDATES = 128
PING = b"\n\n"
"""White space, valid in an event stream and in a JSON list. Google's clients do not accept comments."""
ERROR_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class ProtoFields(Fields):
    """An object whose keys are in camel case or in snake case."""

    def __init__(self, value: Any, path: str = "") -> None:
        super().__init__(
            {camel(key): part for key, part in value.items()} if isinstance(value, Mapping) else value, path
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GeminiRequest(ChatRequest):
    """A request of Gemini's API."""

    as_events: bool
    """True if the answer is streamed as events, False as elements of a JSON list."""
    with_thoughts: bool


def read_request(body: Any, *, model: str, is_stream: bool, as_events: bool) -> GeminiRequest:
    """Read the body of `generateContent` or `streamGenerateContent`."""
    fields = ProtoFields(body)
    config = fields.part("generationConfig")
    media = Media([*check_fields(fields, KNOWN), *check_fields(config, KNOWN_CONFIG)])
    if [kind for kind in config.items("responseModalities") if str(kind).upper() != "TEXT"]:
        raise RequestError("expected TEXT", field=config.name("responseModalities"))
    return GeminiRequest(
        **_content(fields, media),
        model=model,
        json=_json(config),
        count=config.number("candidateCount", low=1, high=MAX_CANDIDATES) or 1,
        max_tokens=config.number("maxOutputTokens", low=1),
        stop=config.stop_texts("stopSequences"),
        sampling=_sampling(config),
        is_stream=is_stream,
        with_reasoning_tokens=True,
        as_events=as_events,
        stream_type=EVENTS if as_events else "application/json",
        with_thoughts=config.part("thinkingConfig").flag("includeThoughts"),
    )


def read_count_request(body: Any, *, model: str) -> ChatRequest:
    """Read the body of `countTokens`."""
    fields: Fields = ProtoFields(body)
    if fields.raw("generateContentRequest") is not None:
        fields = fields.child("generateContentRequest")
    return ChatRequest(model=model, **_content(fields, Media()))


def speaks_gemini(request: Request) -> bool:
    path = request.scope["path"]
    return (
        KEY_HEADER in request.headers
        or "/v1beta/models" in path
        or path.endswith((":countTokens", *(f":{m}" for m in METHODS)))
    )


def camel(name: Any) -> Any:
    return re.sub("_([a-z])", lambda found: found[1].upper(), name) if isinstance(name, str) else name


def _sampling(config: Fields) -> dict[str, Any]:
    numbers = config.numbers(SAMPLING)
    if "topK" in numbers:  # a float in Gemini's JSON
        numbers["topK"] = int(numbers["topK"])
    return {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): value for name, value in numbers.items()}


def _content(fields: Fields, media: Media) -> dict[str, Any]:
    messages = read_contents(fields.objects("contents", required=True), media)
    if not messages:
        raise wrong("contents", "at least one content", [])
    if fields.raw("systemInstruction") is not None:
        system = text_of_parts(fields.child("systemInstruction").objects("parts", required=True), media)
        messages = [ChatMessage(role="system", content=system)] * bool(system) + messages
    tools, must_call = _tools(fields)
    seen = {"left_out": tuple(dict.fromkeys(media.left_out)), "images": media.images}
    return {"messages": tuple(messages), "tools": tools, "must_call": must_call, **seen}


def _tools(fields: Fields) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    tools: list[Mapping[str, Any]] = []
    for tool in fields.objects("tools"):
        foreign = [name for name in tool.names() if name != "functionDeclarations" and tool.raw(name) is not None]
        if foreign:
            raise RequestError("only Google runs this tool", field=tool.name(foreign[0]))
        tools += [_function(declared) for declared in tool.objects("functionDeclarations")]
    calling = fields.part("toolConfig").part("functionCallingConfig")
    mode = calling.text("mode", "AUTO").upper()
    if mode in ("AUTO", "VALIDATED", "MODE_UNSPECIFIED"):
        return tuple(tools), ()
    if mode == "NONE":
        return (), ()
    if mode != "ANY":
        raise wrong(calling.name("mode"), "AUTO, ANY, NONE or VALIDATED", mode)
    where = calling.name("allowedFunctionNames")
    named = dict.fromkeys(str(name) for name in calling.items("allowedFunctionNames"))
    any_of = tools_to_call(tools, named=None, field=calling.name("mode"))
    allowed = tuple(one for name in named for one in tools_to_call(tools, named=name, field=where))
    # The turn's opening names a single tool. Among several the model chooses, so it may see no other.
    kept = [tool for tool in tools if len(allowed) < 2 or tool["function"]["name"] in allowed]
    return tuple(kept), allowed or any_of


def _function(declared: Fields) -> Mapping[str, Any]:
    schema = declared.raw("parametersJsonSchema")
    if schema is None:
        schema = plain_schema(declared.raw("parameters"))
    return {"type": "function", "function": described(declared, schema, field="parameters")}


def _json(config: Fields) -> JsonDemand | None:
    kind = config.text("responseMimeType", "text/plain")
    if kind == "text/plain":
        return None
    if kind != "application/json":
        raise wrong(config.name("responseMimeType"), "text/plain or application/json", kind)
    for name in ("responseJsonSchema", "responseSchema"):
        schema = config.raw(name)
        if schema is not None and not isinstance(schema, dict):
            raise wrong(config.name(name), "a JSON schema", schema)
        if schema:
            return JsonDemand(schema=plain_schema(schema), field=config.name(name))
    return JsonDemand(schema=ANY_OBJECT, field=config.name("responseMimeType"))


def answer(request: GeminiRequest, completion: Completion) -> dict[str, Any]:
    candidates = [_candidate(index, _parts(request, choice), choice) for index, choice in enumerate(completion.choices)]
    return _body(request, completion, candidates, usage=_usage(completion))


def stream(request: GeminiRequest, completion: Completion) -> Iterator[bytes]:
    """The chunks of a streamed answer, as events or as a JSON list."""
    for number, chunk in enumerate(_chunks(request, completion)):
        yield _written(request, chunk, is_first=number == 0)
    yield b"" if request.as_events else b"]"


def token_count(num_tokens: int) -> dict[str, Any]:
    return {"totalTokens": num_tokens}


def error_body(error: RequestError | BackendError) -> dict[str, Any]:
    status = ERROR_STATUS.get(error.status, "FAILED_PRECONDITION" if error.status < 500 else "INTERNAL")
    return {"error": {"code": error.status, "message": str(error), "status": status}}


def error_event(request: GeminiRequest, error: RequestError | BackendError) -> bytes:
    written = _written(request, error_body(error), is_first=True)
    return written if request.as_events else written + b"]"


def models(name: str) -> dict[str, Any]:
    return {"models": [model(name)]}


def model(name: str) -> dict[str, Any]:
    methods = [*METHODS, "countTokens"]
    return {"name": f"models/{name}", "version": "1", "displayName": name, "supportedGenerationMethods": methods}


def _chunks(request: GeminiRequest, completion: Completion) -> Iterator[dict[str, Any]]:
    """Thoughts, text and calls of each candidate; its last chunk has the finish reason, the very last the usage."""
    last = len(completion.choices) - 1
    for index, choice in enumerate(completion.choices):
        parts = _parts(request, choice)
        calls = [part for part in parts if "functionCall" in part]
        pieces = [[part] for part in parts if "functionCall" not in part] + ([calls] if calls else [])
        for piece in pieces[:-1]:
            yield _body(request, completion, [_candidate(index, piece, None)])
        usage = _usage(completion) if index == last else None
        yield _body(request, completion, [_candidate(index, pieces[-1], choice)], usage=usage)


def _body(
    request: GeminiRequest,
    completion: Completion,
    candidates: list[dict[str, Any]],
    *,
    usage: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    body: dict[str, Any] = {"candidates": candidates}
    if usage is not None:
        body["usageMetadata"] = usage
    return {**body, "modelVersion": request.model, "responseId": completion.id}


def _candidate(index: int, parts: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}}
    if choice is not None:
        candidate["finishReason"] = "MAX_TOKENS" if choice.stop_cause == "length" else "STOP"
    return {**candidate, "index": index}


def _parts(request: GeminiRequest, choice: Choice) -> list[dict[str, Any]]:
    message = choice.message
    parts: list[dict[str, Any]] = []
    if message.content or not message.tool_calls:
        parts.append({"text": message.content})
    parts += [{"functionCall": {"id": one.id, "args": one.arguments, "name": one.name}} for one in message.tool_calls]
    if message.reasoning:
        # The first part after the thoughts carries them for clients that drop thoughts.
        parts[0]["thoughtSignature"] = seal(message.reasoning)
        if request.with_thoughts:
            parts.insert(0, {"text": message.reasoning, "thought": True})
    return parts


def _usage(completion: Completion) -> dict[str, int]:
    prompt, generated = completion.prompt_tokens, completion.completion_tokens
    thoughts = sum(choice.reasoning_tokens or 0 for choice in completion.choices)
    counts = {"promptTokenCount": prompt, "candidatesTokenCount": generated - thoughts}
    if thoughts:
        counts["thoughtsTokenCount"] = thoughts
    return {**counts, "totalTokenCount": prompt + generated}


def _written(request: GeminiRequest, body: Mapping[str, Any], *, is_first: bool) -> bytes:
    return event(body) if request.as_events else (b"[" if is_first else b",\n") + json_bytes(body)
