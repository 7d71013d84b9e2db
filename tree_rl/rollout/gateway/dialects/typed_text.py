"""Converts arguments that a dialect writes as plain text, by the tool's JSON schema.

The text `5` becomes a string for a parameter of type string, and a number for one of type integer.
"""

from collections.abc import Mapping
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import Tools
from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_PYTHON = {"True": True, "False": False, "None": None}
"""Values that templates of Qwen3-Coder write as Python does."""


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool."""
    return str(tool["function"]["name"])


def is_offered(name: str, tools: Tools) -> bool:
    """True if a tool has this name."""
    return any(name_of(tool) == name for tool in tools)


def parameters_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """The JSON schemas of a tool's parameters; empty if the tool declares none."""
    schema = next((tool["function"].get("parameters") for tool in tools if name_of(tool) == name), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def typed(text: str, schema: Any) -> Any:
    """Decode a text if the parameter's schema allows its value; otherwise, or without a schema, return the text."""
    if schema is None:
        return text
    types = _types(schema)
    if types == {"string"}:
        return text
    value = _PYTHON[text] if text in _PYTHON else _decoded(text)
    if not types or value is text:
        return value
    allowed = tuple(kind for one in types for kind in _JSON_TYPES.get(one, ()))
    is_allowed = isinstance(value, allowed) and (not isinstance(value, bool) or "boolean" in types)
    return value if is_allowed or ("string" not in types and not isinstance(value, str)) else text


def _decoded(text: str) -> Any:
    try:
        return decode_json(text)
    except JsonError:
        return text


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {one for one in declared if isinstance(one, str)}
    branches = schema.get("anyOf") or schema.get("oneOf") or ()
    if branches:
        known = [_types(branch) for branch in branches]
        return set().union(*known) if all(known) else set()
    values = schema.get("enum")
    return {"string"} if isinstance(values, list) and all(isinstance(value, str) for value in values) else set()
