"""JSON that stands in the text of a turn."""

import json
from collections.abc import Mapping
from typing import Any

from tree_rl.rollout.gateway.dialects.reading import UnreadableCallError, WrittenCall
from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

_DECODER = json.JSONDecoder()


def read_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a position, and where it ends: end marks inside its strings do not end it.

    Raises:
        UnreadableCallError: there is none, the text ends inside it, or later steps cannot write it again.
    """
    start = skip_space(text, start)
    try:
        _, end = _DECODER.raw_decode(text, start)
        return decode_json(text[start:end]), end
    except (ValueError, RecursionError) as error:
        is_cut = isinstance(error, json.JSONDecodeError) and _ends_inside(text, error)
        raise UnreadableCallError("unclosed" if is_cut else "no_json") from error


def skip_space(text: str, start: int) -> int:
    """The first position from `start` on that is no white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def read_object(arguments: Any) -> Mapping[str, Any]:
    """Arguments that must be an object, also where they are JSON in a string. Raises `UnreadableCallError`."""
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except JsonError as error:
            raise UnreadableCallError("no_json") from error
    if not isinstance(arguments, dict):
        raise UnreadableCallError("no_object")
    return arguments


def read_named(call: Any, *, keys: tuple[str, ...] = ("arguments",)) -> WrittenCall:
    """A call that is a JSON object with a name, and arguments under one of `keys`. Raises `UnreadableCallError`."""
    if not isinstance(call, dict):
        raise UnreadableCallError("no_object")
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise UnreadableCallError("no_name")
    written: Any = next((call[key] for key in keys if key in call), {})
    id_ = call.get("id")
    return WrittenCall(name=call["name"], arguments=read_object(written), id=id_ if isinstance(id_, str) else None)


def _ends_inside(text: str, error: json.JSONDecodeError) -> bool:
    return error.pos >= len(text) or error.msg.startswith("Unterminated string")
