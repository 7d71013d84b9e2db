"""Tool calls and tool schemas, in the form that chat templates read."""

from typing import Any

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.messages.json_cells import decoded, decoded_list, is_nothing
from tree_rl.rollout.gateway.protocols.plain_json import decode_json

ARGUMENTS = ("arguments", "args", "input", "parameters")
"""Names of a call's arguments in OpenAI, LangChain, Anthropic and Llama."""
TOOL_WRAPPERS = ("tools", "functions", "function_declarations", "functionDeclarations")
SCHEMAS = ("parameters", "input_schema", "inputSchema")


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of calls, one call or JSON text of them, as {type, id, function: {name, arguments}}.

    Arguments given as JSON text stay JSON text. Raises a RowFileError, which begins with `where`, for a call that is
    not an object or has no name.
    """
    items = [] if is_nothing(value) else decoded_list(value)
    if items is None:
        raise _no_calls(value, where)
    return [_call(item, where) for item in items if not is_nothing(item)]


def _call(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise _no_calls(item, where)
    function = decoded(item.get("function"))
    named = function if isinstance(function, dict) else item
    name = named.get("name") or (function if isinstance(function, str) else None)
    if not isinstance(name, str) or not name:
        raise _no_calls(item, where)
    held = next((named[key] for key in ARGUMENTS if named.get(key) is not None), None)
    call_id = item.get("id") or item.get("call_id")
    call = {"type": "function", "function": {"name": name, "arguments": _arguments(held)}}
    return call if call_id is None else {**call, "id": call_id}


def _arguments(held: Any) -> Any:
    if is_nothing(held):
        return {}
    inner = held
    while isinstance(inner, str) and inner.lstrip().startswith('"') and isinstance(decoded(inner), dict):
        # JSON text encoded twice: undo one encoding.
        inner = decode_json(inner)
    return inner


def _no_calls(received: Any, where: str) -> RowFileError:
    return RowFileError(
        f"{where}: expected tool calls with a name each, or JSON text of them, received {quoted(received)}; correct it"
    )


def read_tools(value: Any, where: str) -> list[Any] | None:
    """Function schemas, None without any; Anthropic's are converted to OpenAI's, which templates read.

    `value` is a list of schemas or one, their JSON text, or an object with a field such as `tools`. Raises a
    RowFileError, which begins with `where`, for any other.
    """
    if is_nothing(value):
        return None
    whole = decoded(value)
    if isinstance(whole, dict):
        wrapper = next((name for name in TOOL_WRAPPERS if name in whole), None)
        if wrapper is not None:
            return read_tools(whole[wrapper], where)
    items = decoded_list(whole)
    if items is None or not all(isinstance(item, dict) for item in items):
        raise RowFileError(
            f"{where}: expected function schemas, a list of objects or JSON text of it, received {quoted(value)}; "
            "correct or drop it"
        )
    return [tool for item in items for tool in _tools(item, where)] or None


def _tools(item: dict[str, Any], where: str) -> list[Any]:
    wrapper = next((name for name in TOOL_WRAPPERS if isinstance(item.get(name), list)), None)
    if wrapper is not None:
        # Gemini: one tool declares several functions.
        return read_tools(item[wrapper], where) or []
    function = decoded(item.get("function"))
    if isinstance(function, dict):
        return [{**item, "function": _decoded_schema(function)}]
    if isinstance(item.get("name"), str) and any(name in item for name in SCHEMAS[1:]):
        schema = next(decoded(item[name]) for name in SCHEMAS[1:] if name in item)
        described: dict[str, Any] = {name: item[name] for name in ("name", "description") if name in item}
        return [{"type": "function", "function": _decoded_schema({**described, "parameters": schema})}]
    return [_decoded_schema(item)] if item else []


def _decoded_schema(function: dict[str, Any]) -> dict[str, Any]:
    """A function with its parameters, and their parts, decoded if they are JSON text."""
    found = {name: decoded(value) if name in SCHEMAS else value for name, value in function.items()}
    for name in SCHEMAS:
        schema = found.get(name)
        if isinstance(schema, dict) and "properties" in schema:
            properties = decoded(schema["properties"])
            if isinstance(properties, dict):
                properties = {key: decoded(value) for key, value in properties.items()}
            found[name] = {**schema, "properties": properties}
            if "required" in schema:
                found[name]["required"] = decoded(schema["required"])
    return found
