"""The one decoding step: JSON that a file keeps as text, and nulls that its columns of objects add."""

from typing import Any

from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

BEGINS = ("[", "{", '"')
NOTHING = ("", "null", "None")


def decoded(value: Any) -> Any:
    """The list or object that a text holds as JSON, however often it was encoded; anything else as it is."""
    inner = value
    while isinstance(inner, str) and inner.lstrip().startswith(BEGINS):
        try:
            inner = decode_json(inner)
        except JsonError:
            return value
    return inner if isinstance(inner, list | dict) else value


def decoded_list(value: Any) -> list[Any] | None:
    """Items of a list, which may be a text of JSON, as may its items; one object is a list of one. Else None."""
    whole = decoded(value)
    if isinstance(whole, dict):
        return [whole]
    return [decoded(item) for item in whole] if isinstance(whole, list) else None


def is_nothing(value: Any) -> bool:
    """Whether a value, or its text, says that there is none."""
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip() in (*NOTHING, "[]", "{}"))


def without_padding(value: Any) -> Any:
    """A value of parquet or Arrow without the null fields of its objects.

    There all objects of a column have the fields of all others. Nulls in lists and in texts of JSON stay.
    """
    if isinstance(value, dict):
        return {name: without_padding(field) for name, field in value.items() if field is not None}
    return [without_padding(item) for item in value] if isinstance(value, list) else value
