"""Decodes JSON that a file stores as text, and drops null fields that parquet adds to objects."""

from typing import Any

from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

BEGINS = ("[", "{", '"')
NOTHING = ("", "null", "None")


def decoded(value: Any) -> Any:
    """The list or object in a JSON text, even if encoded several times; any other value unchanged."""
    inner = value
    while isinstance(inner, str) and inner.lstrip().startswith(BEGINS):
        try:
            inner = decode_json(inner)
        except JsonError:
            return value
    return inner if isinstance(inner, list | dict) else value


def decoded_list(value: Any) -> list[Any] | None:
    """The decoded items of a list, or of its JSON text; a single object becomes a list of one. Else None."""
    whole = decoded(value)
    if isinstance(whole, dict):
        return [whole]
    return [decoded(item) for item in whole] if isinstance(whole, list) else None


def is_nothing(value: Any) -> bool:
    """True if a value, or its text, is empty or null."""
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip() in (*NOTHING, "[]", "{}"))


def without_padding(value: Any) -> Any:
    """A value of a parquet or Arrow column, where all objects have the same fields, without null fields.

    Nulls in lists and in JSON text stay.
    """
    if isinstance(value, dict):
        return {name: without_padding(field) for name, field in value.items() if field is not None}
    return [without_padding(item) for item in value] if isinstance(value, list) else value
