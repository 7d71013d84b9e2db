"""Converts Gemini's schemas, whose types are in capitals, to JSON schemas."""

from typing import Any

NAMED = ("properties", "defs", "$defs")
"""Keys whose values map names to schemas."""
LISTED = ("anyOf", "prefixItems")
WORDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""Keys whose numbers are strings, like every 64-bit number in Gemini's JSON."""


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
