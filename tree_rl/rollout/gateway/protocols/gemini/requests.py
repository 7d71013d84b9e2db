"""Requests of Gemini's API. Like Google's servers, we read names in camel case and in snake case."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tree_rl.rollout.gateway.protocols.demands import ANY_OBJECT, JsonDemand, tools_to_call
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import (
    MAX_INTEGER,
    Fields,
    RequestError,
    check_stop_texts,
    wrong,
)
from tree_rl.rollout.gateway.protocols.gemini.contents import read_contents, text_of_parts
from tree_rl.rollout.gateway.protocols.gemini.schemas import plain_schema
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.protocols.request_fields import notes_of_unknown

METHODS = {"generateContent": False, "streamGenerateContent": True}
"""Methods, and True for those that stream."""
KEY_HEADER = "x-goog-api-key"
KNOWN = {
    *("cachedContent", "contents", "generationConfig", "model", "systemInstruction", "toolConfig", "tools"),
    *("labels", "safetySettings", "serviceTier", "store"),
}
"""Known fields. The last four have no effect: the gateway does not filter, bill or store answers."""
READ_CONFIG = {
    *("candidateCount", "frequencyPenalty", "maxOutputTokens", "presencePenalty", "responseJsonSchema"),
    *("responseMimeType", "responseModalities", "responseSchema", "seed", "stopSequences", "temperature"),
    *("thinkingConfig", "topK", "topP"),
}
CONFIG_WITHOUT_EFFECT = {
    *("audioTimestamp", "enableAffectiveDialog", "enableEnhancedCivicAnswers", "mediaResolution"),
    *("modelSelectionConfig", "routingConfig"),
}
CONFIG_REFUSED = (
    *("audioTranscriptionConfig", "imageConfig", "logprobs", "responseFormat", "responseLogprobs", "speechConfig"),
    "translationConfig",
)
MAX_CANDIDATES = 128


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

    @property
    def stream_type(self) -> str:
        # `super()` of a class with slots needs its name.
        return super(GeminiRequest, self).stream_type if self.as_events else "application/json"


def read_request(body: Any, *, model: str, is_stream: bool, as_events: bool) -> GeminiRequest:
    """Read the body of `generateContent` or `streamGenerateContent`."""
    fields = ProtoFields(body)
    config = _child(fields, "generationConfig")
    for holder, name in ((fields, "cachedContent"), *((config, name) for name in CONFIG_REFUSED)):
        if holder.raw(name):
            raise RequestError("not supported by this gateway; leave it out", field=holder.name(name))
    if [kind for kind in config.items("responseModalities") if str(kind).upper() != "TEXT"]:
        raise RequestError("expected TEXT", field=config.name("responseModalities"))
    stop = config.items("stopSequences")
    check_stop_texts(config.name("stopSequences"), stop)
    read = _content(fields)
    known_config = READ_CONFIG | CONFIG_WITHOUT_EFFECT | {*CONFIG_REFUSED}
    unknown = [name for name in fields.names() if name not in KNOWN]
    unknown += [config.name(name) for name in config.names() if name not in known_config]
    return GeminiRequest(
        **{**read, "left_out": tuple(dict.fromkeys([*notes_of_unknown(unknown), *read["left_out"]]))},
        model=model,
        json=_json(config),
        count=config.integer("candidateCount", 1, low=1, high=MAX_CANDIDATES) or 1,
        max_tokens=config.integer("maxOutputTokens", None, low=1),
        stop=tuple(stop),
        sampling=_sampling(config),
        is_stream=is_stream,
        with_reasoning_tokens=True,
        as_events=as_events,
        with_thoughts=_child(config, "thinkingConfig").flag("includeThoughts"),
    )


def read_count_request(body: Any, *, model: str) -> ChatRequest:
    """Read the body of `countTokens`."""
    fields = ProtoFields(body)
    if fields.raw("generateContentRequest") is not None:
        fields = _child(fields, "generateContentRequest")
    return ChatRequest(model=model, **_content(fields))


def key_of(request: Request) -> str | None:
    return request.headers.get(KEY_HEADER) or request.query_params.get("key")


def speaks_gemini(request: Request) -> bool:
    path = request.scope["path"]
    return (
        KEY_HEADER in request.headers
        or "/v1beta/models" in path
        or path.endswith((":countTokens", *(f":{m}" for m in METHODS)))
    )


def camel(name: Any) -> Any:
    return re.sub("_([a-z])", lambda found: found[1].upper(), name) if isinstance(name, str) else name


def _child(fields: ProtoFields, key: str) -> ProtoFields:
    return ProtoFields({} if fields.raw(key) is None else fields.raw(key), fields.name(key))


def _content(fields: ProtoFields) -> dict[str, Any]:
    left_out: list[str] = []
    messages = read_contents(fields.objects("contents", required=True), left_out)
    if not messages:
        raise wrong("contents", "at least one content", [])
    if fields.raw("systemInstruction") is not None:
        system = text_of_parts(fields.child("systemInstruction").objects("parts", required=True), left_out)
        messages = [ChatMessage(role="system", content=system)] * bool(system) + messages
    tools, must_call = _tools(fields)
    return {"messages": tuple(messages), "tools": tools, "must_call": must_call, "left_out": tuple(left_out)}


def _tools(fields: ProtoFields) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    tools: list[Mapping[str, Any]] = []
    for tool in fields.objects("tools"):
        foreign = [name for name in tool.names() if name != "functionDeclarations" and tool.raw(name) is not None]
        if foreign:
            raise RequestError("only Google runs this tool", field=tool.name(foreign[0]))
        tools += [_function(declared) for declared in tool.objects("functionDeclarations")]
    calling = _child(_child(fields, "toolConfig"), "functionCallingConfig")
    mode = calling.text("mode", "AUTO").upper()
    if mode in ("AUTO", "VALIDATED", "MODE_UNSPECIFIED"):
        return tuple(tools), ()
    if mode == "NONE":
        return (), ()
    if mode != "ANY":
        raise wrong(calling.name("mode"), "AUTO, ANY, NONE or VALIDATED", mode)
    where = calling.name("allowedFunctionNames")
    named = [str(name) for name in calling.items("allowedFunctionNames")]
    any_of = tools_to_call(tools, named=None, field=calling.name("mode"))
    return tuple(tools), tuple(one for name in named for one in tools_to_call(tools, named=name, field=where)) or any_of


def _function(declared: Fields) -> Mapping[str, Any]:
    schema = declared.raw("parametersJsonSchema")
    if schema is None:
        schema = plain_schema(declared.raw("parameters"))
    if not isinstance(schema, dict | None):
        raise wrong(declared.name("parameters"), "a JSON schema", schema)
    described = {"name": declared.text("name"), "description": declared.text("description", "")}
    parameters = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _json(config: ProtoFields) -> JsonDemand | None:
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


def _sampling(config: ProtoFields) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "temperature": config.number("temperature", low=0.0, high=2.0),
        "top_p": config.number("topP", low=0.0, high=1.0),
        "presence_penalty": config.number("presencePenalty", low=-2.0, high=2.0),
        "frequency_penalty": config.number("frequencyPenalty", low=-2.0, high=2.0),
        "seed": config.integer("seed", None, low=-(2**63), high=2**63 - 1),
    }
    top_k = config.number("topK", low=0, high=MAX_INTEGER)
    numbers["top_k"] = None if top_k is None else int(top_k)
    return {key: value for key, value in numbers.items() if value is not None}
