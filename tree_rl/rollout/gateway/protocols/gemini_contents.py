"""Converts Gemini's contents to messages, and its schemas, whose types are in capitals, to JSON schemas."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError, wrong
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage, Media
from tree_rl.rollout.gateway.protocols.sealed_reasoning import unseal

ROLES = ("user", "model", "function")
NAMED = ("properties", "defs", "$defs")
"""Keys whose values map names to schemas."""
LISTED = ("anyOf", "prefixItems")
WORDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""Keys whose numbers are strings, like every 64-bit number in Gemini's JSON."""
UNSEEN = {"image": "image", "audio": "sound"}
"""Name of each kind of media, by the first part of its type. All others are files."""


def read_contents(contents: Iterable[Fields], media: Media) -> list[ChatMessage]:
    """Read the field `contents`. Joins a turn's contents, as clients store each streamed chunk as one of its own."""
    messages: list[ChatMessage] = []
    num_calls = 0
    for is_model, group in groupby(contents, key=_is_model):
        if is_model:
            parts = [part for content in group for part in content.objects("parts")]
            turn = _turn(parts, num_calls, media)
            num_calls += len(turn.tool_calls)
            messages.append(turn)
        else:
            for content in group:
                messages += _given(content.objects("parts", required=True), media)
    return messages


def text_of_parts(parts: Iterable[Fields], media: Media) -> str:
    return "\n".join(_text(part, media) for part in parts)


def _is_model(content: Fields) -> bool:
    role = content.text("role", "user")
    if role not in ROLES:
        raise wrong(content.name("role"), ", ".join(ROLES), role)
    return role == "model"


def _turn(parts: Sequence[Fields], num_calls: int, media: Media) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[CalledTool] = []
    sealed: str | None = None
    for part in parts:
        # Signatures of other servers and of clients unseal to None.
        sealed = unseal(part.text("thoughtSignature", "")) or sealed
        if part.raw("functionCall") is not None:
            calls.append(_called(part.child("functionCall"), f"call_{num_calls + len(calls)}"))
        elif part.flag("thought"):
            thoughts.append(part.text("text", ""))
        else:
            texts.append(_text(part, media))
    # No separator: the parts are chunks of one text.
    reasoning = sealed or "".join(thoughts) or None
    return ChatMessage(role="assistant", content="".join(texts), reasoning=reasoning, tool_calls=tuple(calls))


def _called(call: Fields, name: str) -> CalledTool:
    arguments = call.raw("args")
    if not isinstance(arguments, dict | None):
        raise wrong(call.name("args"), "a JSON object", arguments)
    return CalledTool(id=call.text("id", "") or name, name=call.text("name"), arguments=arguments or {})


def _given(parts: Sequence[Fields], media: Media) -> list[ChatMessage]:
    """Tool results become separate messages before the user's text."""
    key = "functionResponse"
    results = [_result(part.child(key), media) for part in parts if part.raw(key) is not None]
    texts = [_text(part, media) for part in parts if part.raw(key) is None]
    return [*results, ChatMessage(role="user", content="\n".join(texts))] if texts or not results else results


def _result(response: Fields, media: Media) -> ChatMessage:
    name, sent_id = response.text("name", "") or None, response.text("id", "") or None
    return ChatMessage(role="tool", content=_output(response, media), tool_call_id=sent_id, name=name)


def _output(response: Fields, media: Media) -> str:
    output: Any = response.raw("response")
    if isinstance(output, Mapping) and list(output) in (["output"], ["result"]):
        (output,) = output.values()
    if not isinstance(output, str | None):
        output = json.dumps(output, ensure_ascii=False)
    return "\n".join([output or "", *(_text(part, media) for part in response.objects("parts"))])


def _text(part: Fields, media: Media) -> str:
    for key in ("inlineData", "fileData"):
        if part.raw(key) is not None:
            data = part.child(key)
            mime = data.text("mimeType", "")
            # Google's clients write base64 for URLs.
            content = data.text("data", "").replace("-", "+").replace("_", "/")
            url = f"data:{mime};base64,{content}" if key == "inlineData" else data.text("fileUri", "")
            kind = UNSEEN.get(mime.split("/")[0], "file")
            return media.shown(kind, data.text("displayName", ""), url=url, field=part.name(key))
    text = part.raw("text")
    if not isinstance(text, str):
        raise RequestError("expected a part with text", field=part.name("text"))
    return text


def plain_schema(schema: Any) -> Any:
    """Convert a schema. Anything that is no schema stays as it is."""
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            plain[key] = value.lower()
        elif key in NAMED and isinstance(value, dict):
            plain[key] = {name: plain_schema(part) for name, part in value.items()}
        elif key in LISTED and isinstance(value, list):
            plain[key] = [plain_schema(part) for part in value]
        elif key in ("items", "additionalProperties"):
            plain[key] = plain_schema(value)
        elif key in WORDS and isinstance(value, str) and value.isdecimal():
            plain[key] = int(value)
        elif key not in ("propertyOrdering", "nullable"):
            plain[key] = value
    if schema.get("nullable") is True and isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"], "null"]
    return plain
