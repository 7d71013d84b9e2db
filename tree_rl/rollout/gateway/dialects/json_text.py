"""Reads JSON inside the text of a turn."""

import json
from collections.abc import Mapping
from typing import Any

from tree_rl.rollout.gateway.dialects.dialect import Tools, UnreadableCallError
from tree_rl.rollout.gateway.dialects.typed_text import parameters_of
from tree_rl.rollout.gateway.protocols.messages import CalledTool
from tree_rl.rollout.gateway.protocols.plain_json import JsonError, decode_json

_DECODER = json.JSONDecoder()
_ENVELOPE = frozenset({"id", "index", "type"})
"""Keys of a call besides its name and arguments."""
_ARGUMENTS = frozenset({"arguments", "parameters", "args", "params", "kwargs", "input"})
"""Keys under which models write the arguments."""


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at a position, and return it with its end. End marks inside its strings do not end it.

    Raises:
        UnreadableCallError: there is none, the text ends inside it, or it is not plain JSON (see `plain_json`).
    """
    start = skip_space(text, start)
    try:
        _, end = _DECODER.raw_decode(text, start)
        return decode_json(text[start:end]), end
    except (ValueError, RecursionError) as error:
        is_cut = isinstance(error, json.JSONDecodeError) and (
            error.pos >= len(text) or error.msg.startswith("Unterminated string")
        )
        raise UnreadableCallError("unclosed" if is_cut else "no_json") from error


def skip_space(text: str, start: int) -> int:
    """The first position from `start` on that is not white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def read_object(arguments: Any) -> Mapping[str, Any]:
    """Arguments as an object, also if they are JSON in a string. Raises `UnreadableCallError` for anything else."""
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except JsonError as error:
            raise UnreadableCallError("no_json") from error
    if not isinstance(arguments, dict):
        raise UnreadableCallError("no_object")
    return arguments


def read_named(call: Any, tools: Tools, *, keys: tuple[str, ...] = ("arguments",)) -> CalledTool:
    """Read a call that is a JSON object with a name and arguments.

    Models also write the arguments under another key, or directly next to the name. We read those too or refuse the
    call, so that no call silently loses its arguments.

    Args:
        keys: keys under which the family writes arguments.

    Raises:
        UnreadableCallError: it has no name, or its other keys cannot be its arguments.
    """
    call = unwrapped(call)
    if not isinstance(call, dict):
        raise UnreadableCallError("no_object")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise UnreadableCallError("no_name")
    written = [call[key] for key in keys if key in call]
    value: Any = next(filter(None, written), written[0] if written else {})
    arguments = read_object(value) if value else {}
    if not arguments:
        declared = parameters_of(name, tools)
        kept = {"name", *keys, *(_ENVELOPE if written else _ENVELOPE - declared.keys())}
        others = {key: other for key, other in call.items() if key not in kept}
        arguments = read_object(_arguments_among(others, declared) if others else value)
    id_ = call.get("id")
    return CalledTool(name=name, arguments=arguments, written_id=id_ if isinstance(id_, str) else None)


def unwrapped(call: Any) -> Any:
    """Remove OpenAI's wrapper, `{"type": "function", "function": CALL}`, from a call."""
    inner = call.get("function") if isinstance(call, dict) and "name" not in call else None
    return {**{key: call[key] for key in call if key == "id"}, **inner} if isinstance(inner, dict) else call


def _arguments_among(others: Mapping[str, Any], declared: Mapping[str, Any]) -> Any:
    """Find the arguments of a call among its other keys."""
    if others.keys() <= declared.keys():
        return dict(others)
    (key, value), *more = others.items()
    if more or key not in _ARGUMENTS:
        raise UnreadableCallError("malformed")
    return value
