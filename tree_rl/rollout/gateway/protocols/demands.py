"""What clients demand of an answer: JSON or a tool call. One form for all protocols."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError, wrong

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""JSON schema of `json_object`."""
NAMESPACE_MARK = "__"
"""Separator of a namespace and a tool's name in the name that the model sees."""
CHOSEN = ("function", "custom")
Functions = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonDemand:
    """The text of the answer must be JSON."""

    schema: Mapping[str, Any]
    field: str
    """Path of the request's field, for errors."""


def described(fields: Fields, parameters: Any, *, field: str) -> dict[str, Any]:
    """A function in the form of chat completions. Its schema of parameters may be absent, but templates print it."""
    if not isinstance(parameters, dict | None):
        raise wrong(fields.name(field), "a JSON schema", parameters)
    parameters = parameters or {"type": "object", "properties": {}}
    return {"name": fields.text("name"), "description": fields.text("description", ""), "parameters": parameters}


def read_json_format(holder: Fields, key: str) -> JsonDemand | None:
    """Read a format: `text`, `json_object` or `json_schema`, whose schema OpenAI wraps in an object of that name."""
    if not holder.raw(key):
        return None
    fields = holder.child(key)
    kind = fields.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonDemand(schema=ANY_OBJECT, field=fields.name("type"))
    if kind != "json_schema":
        raise wrong(fields.name("type"), "text, json_object or json_schema", kind)
    holder = fields.child("json_schema") if fields.raw("json_schema") is not None else fields
    schema = holder.raw("schema")
    if not isinstance(schema, dict):
        raise wrong(holder.name("schema"), "a JSON schema", schema)
    return JsonDemand(schema=schema, field=holder.name("schema"))


def tools_to_call(tools: Sequence[Mapping[str, Any]], *, named: str | None, field: str) -> tuple[str, ...]:
    """The tools of which an answer must call one: the one that the client names, or (None) any.

    Raises `RequestError`, which names the request's `field`, if no such tool is offered.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if not names or (named is not None and named not in names):
        offered = ", ".join(names) or "no tools"
        raise RequestError(f"expected one of the offered tools ({offered}), received {named or 'any'!r}", field=field)
    return names if named is None else (named,)


def chosen_tools(fields: Fields, functions: Functions) -> tuple[Functions, tuple[str, ...]]:
    """The tools that OpenAI's field `tool_choice` allows, and those of which one must be called."""
    choice = fields.raw("tool_choice")
    if choice in (None, "auto"):
        return functions, ()
    if choice == "none":
        return (), ()
    if choice == "required":
        return functions, tools_to_call(functions, named=None, field="tool_choice")
    if not isinstance(choice, dict):
        raise wrong("tool_choice", "none, auto, required or an object that names a tool", choice)
    asked = fields.child("tool_choice")
    kind = asked.text("type")
    if kind in CHOSEN:
        named = _inner(asked, kind)
        return functions, tools_to_call(functions, named=seen_name(named), field=named.name("name"))
    if kind != "allowed_tools":
        raise RequestError(
            f"expected {', '.join(CHOSEN)} or allowed_tools, received {kind!r}", field="tool_choice.type"
        )
    allowed = _inner(asked, kind)
    names = [seen_name(_inner(tool, tool.text("type"))) for tool in allowed.objects("tools", required=True)]
    for name in names:
        tools_to_call(functions, named=name, field=allowed.name("tools"))
    kept = tuple(function for function in functions if function["function"]["name"] in names)
    is_required = allowed.text("mode") == "required"
    return kept, tools_to_call(kept, named=None, field="tool_choice") if is_required else ()


def _inner(fields: Fields, kind: str) -> Fields:
    """The fields that chat completions put into an object of the kind's name, the Responses API next to the type."""
    return fields.child(kind) if fields.raw(kind) is not None else fields


def seen_name(fields: Fields) -> str:
    """The name that the model sees of a tool."""
    name, namespace = fields.text("name"), fields.text("namespace", "")
    return f"{namespace}{NAMESPACE_MARK}{name}" if namespace else name
