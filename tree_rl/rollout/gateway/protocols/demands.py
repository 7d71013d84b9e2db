"""What clients demand of an answer: JSON or a tool call. One form for all protocols."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError, wrong

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""JSON schema of `json_object`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonDemand:
    """The text of the answer must be JSON."""

    schema: Mapping[str, Any]
    field: str
    """Path of the request's field, for errors."""


def read_json_format(fields: Fields) -> JsonDemand | None:
    """Read a format: `text`, `json_object` or `json_schema`, whose schema OpenAI wraps in an object of that name.

    Raises:
        RequestError: another type, or no schema.
    """
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
    """The tools of which an answer must call one.

    Args:
        named: the tool that the client names; None for any.
        field: path of the request's field, for errors.

    Raises:
        RequestError: the request offers no such tool.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if not names or (named is not None and named not in names):
        offered = ", ".join(names) or "no tools"
        raise RequestError(f"expected one of the offered tools ({offered}), received {named or 'any'!r}", field=field)
    return names if named is None else (named,)
