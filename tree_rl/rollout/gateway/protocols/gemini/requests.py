"""Requests of Gemini's API. Google's servers read names in both spellings, so both are read here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

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

METHODS = {"generateContent": False, "streamGenerateContent": True}
"""Whether each one streams."""
KEY_HEADER = "x-goog-api-key"
READ = {"contents", "generationConfig", "model", "systemInstruction", "toolConfig", "tools"}
WITHOUT_EFFECT = {"labels", "safetySettings", "serviceTier", "store"}
"""Nothing here filters answers, bills them or keeps them."""
READ_CONFIG = {
    *("candidateCount", "frequencyPenalty", "maxOutputTokens", "presencePenalty", "responseMimeType"),
    *("responseModalities", "seed", "stopSequences", "temperature", "thinkingConfig", "topK", "topP"),
}
CONFIG_WITHOUT_EFFECT = {"enableEnhancedCivicAnswers", "mediaResolution"}
MAX_CANDIDATES = 128


class ProtoFields(Fields):
    """An object whose keys are in camel case or in snake case."""

    def __init__(self, value: Any, path: str = "") -> None:
        super().__init__(
            {camel(key): part for key, part in value.items()} if isinstance(value, Mapping) else value, path
        )

    def refuse_unknown(self, known: set[str], where: str) -> None:
        """Refuse fields that are not known here by name."""
        for key, value in self._value.items():
            if value is not None and key not in known:
                raise RequestError(f"not supported by this gateway in {where}; leave it out", field=self.name(key))


@dataclass(frozen=True, kw_only=True, slots=True)
class GeminiRequest(ChatRequest):
    """A request and the form of its answer."""

    as_events: bool
    """Stream events; else the elements of a JSON list."""
    with_thoughts: bool

    @property
    def stream_type(self) -> str:
        """Media type of a streamed answer."""
        # `super()` of a class with slots needs its name.
        return super(GeminiRequest, self).stream_type if self.as_events else "application/json"


def read_request(body: Any, *, model: str, is_stream: bool, as_events: bool) -> GeminiRequest:
    """Read the body of `generateContent` or `streamGenerateContent`."""
    fields = ProtoFields(body)
    fields.refuse_unknown(READ | WITHOUT_EFFECT, "a request")
    config = _child(fields, "generationConfig")
    config.refuse_unknown(READ_CONFIG | CONFIG_WITHOUT_EFFECT, "generationConfig")
    _refuse_constraints(config)
    stop = config.items("stopSequences")
    check_stop_texts(config.name("stopSequences"), stop)
    return GeminiRequest(
        model=model,
        messages=_messages(fields),
        tools=_tools(fields),
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
    return ChatRequest(model=model, messages=_messages(fields), tools=_tools(fields))


def key_of(request: Request) -> str | None:
    """The key that a client of Gemini sends."""
    return request.headers.get(KEY_HEADER) or request.query_params.get("key")


def speaks_gemini(request: Request) -> bool:
    """Whether a request is one of Gemini's API."""
    path = request.scope["path"]
    return (
        KEY_HEADER in request.headers
        or "/v1beta/models" in path
        or path.endswith((":countTokens", *(f":{m}" for m in METHODS)))
    )


def camel(name: Any) -> Any:
    """A key in camel case."""
    return re.sub("_([a-z])", lambda found: found[1].upper(), name) if isinstance(name, str) else name


def _child(fields: ProtoFields, key: str) -> ProtoFields:
    return ProtoFields({} if fields.raw(key) is None else fields.raw(key), fields.name(key))


def _messages(fields: ProtoFields) -> tuple[ChatMessage, ...]:
    messages = read_contents(fields.objects("contents", required=True))
    if not messages:
        raise wrong("contents", "at least one content", [])
    if fields.raw("systemInstruction") is None:
        return tuple(messages)
    system = text_of_parts(fields.child("systemInstruction").objects("parts", required=True))
    return (ChatMessage(role="system", content=system), *messages) if system else tuple(messages)


def _tools(fields: ProtoFields) -> tuple[Mapping[str, Any], ...]:
    calling = _child(_child(fields, "toolConfig"), "functionCallingConfig")
    mode = calling.text("mode", "AUTO").upper()
    if mode not in ("AUTO", "NONE", "MODE_UNSPECIFIED"):
        raise RequestError("expected AUTO or NONE: the gateway cannot force a tool call", field=calling.name("mode"))
    tools: list[Mapping[str, Any]] = []
    for tool in fields.objects("tools"):
        assert isinstance(tool, ProtoFields)
        tool.refuse_unknown({"functionDeclarations"}, "tools, whose others only Google runs")
        tools += [_function(declared) for declared in tool.objects("functionDeclarations")]
    return () if mode == "NONE" else tuple(tools)


def _function(declared: Fields) -> Mapping[str, Any]:
    schema = declared.raw("parametersJsonSchema")
    if schema is None:
        schema = plain_schema(declared.raw("parameters"))
    if not isinstance(schema, dict | None):
        raise wrong(declared.name("parameters"), "a JSON schema", schema)
    described = {"name": declared.text("name"), "description": declared.text("description", "")}
    parameters = schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _refuse_constraints(config: ProtoFields) -> None:
    """Refuse what would constrain the model's tokens: the gateway cannot enforce it."""
    if config.text("responseMimeType", "text/plain") != "text/plain":
        raise RequestError(
            "expected text/plain: the gateway cannot force a format", field=config.name("responseMimeType")
        )
    if [kind for kind in config.items("responseModalities") if str(kind).upper() != "TEXT"]:
        raise RequestError("expected TEXT", field=config.name("responseModalities"))


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
