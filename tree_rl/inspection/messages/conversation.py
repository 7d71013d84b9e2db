"""Reads one conversation in any known format as the messages and tools that a chat template expects."""

from dataclasses import dataclass
from typing import Any

from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.messages.blocks import read_blocks
from tree_rl.inspection.messages.calls import TOOL_WRAPPERS, read_calls, read_tools
from tree_rl.inspection.messages.json_cells import decoded, is_nothing
from tree_rl.inspection.messages.roles import ASSISTANT, CALLS, EXPECTED, SYSTEM, TOOL, UNREAD, USER, role_named
from tree_rl.inspection.messages.template_form import TemplateForm

CONVERSATIONS = ("messages", "traj", "conversation", "conversations", "history")
WRAPPERS = (*CONVERSATIONS, "input", "contents", "request", "chat", "kwargs", "body", "data")
"""Fields of an object that may hold a conversation."""
SYSTEMS = ("system", "instructions", "system_instruction", "systemInstruction")
"""Fields of the same object that may hold its system text."""
SPEAKERS = ("role", "from", "speaker", "author")
SAID = ("content", "value", "parts", "text")
MOST_LAYERS = 20
"""Most nested wrappers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A conversation in the form that the model's chat template expects."""

    messages: list[dict[str, Any]]
    """At least one message: role, content, and other fields that the template may read; no field is null."""
    tools: list[Any] | None
    """Function schemas."""


def read_chat(cell: Any, tools: Any, form: TemplateForm, where: str, *, system: Any = None) -> Chat | None:
    """The conversation in one cell; None if it holds none.

    Args:
        cell: a list of messages, an object that holds one, or JSON text of either, nested in any way.
        tools: function schemas from another column; without any, those inside the cell are used.
        form: form of messages that the model's template expects.
        where: beginning of error messages.
        system: text or parts from another column, for a conversation without a system message.

    Raises:
        RowFileError: a role, a part, a call or a tool that cannot be read.
    """
    found = _items(cell)
    if found is None:
        return None
    items, fields = found
    messages = [
        message
        for number, item in enumerate(items)
        for message in _read(item, form, f"{where}, message {number}" if len(items) > 1 or number else where)
    ]
    inside = next((fields[name] for name in TOOL_WRAPPERS if not is_nothing(fields.get(name))), None)
    offered = read_tools(tools, f"{where}, tools") or read_tools(inside, f"{where}, tools")
    instructions = next((fields[name] for name in SYSTEMS if fields.get(name)), system)
    if instructions and messages and messages[0]["role"] != SYSTEM:
        text = read_blocks(instructions, SYSTEM, f"{where}, system").content
        messages = [{"role": SYSTEM, "content": text}, *messages] if text else messages
    return Chat(messages=messages, tools=offered) if messages else None


def holds_messages(cell: Any) -> bool:
    """True if a value, or the JSON in a text, is a conversation."""
    return _items(cell) is not None


def _items(cell: Any) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
    """Messages as the file has them, and all fields of the objects around them."""
    whole, fields = decoded(cell), dict[str, Any]()
    for _ in range(MOST_LAYERS):
        if isinstance(whole, dict) and not _is_message(whole):
            layer = whole
            name = next((name for name in WRAPPERS if not is_nothing(layer.get(name))), None)
            if name is None:
                return None
            fields, whole = {**fields, **layer}, decoded(layer[name])
            if isinstance(whole, str) and name in ("input", "contents"):
                # A request may consist of a single question.
                whole = [{"role": USER, "content": whole}]
        elif isinstance(whole, list) and len(whole) == 1 and isinstance(decoded(whole[0]), list):
            whole = decoded(whole[0])
        else:
            break
    items = [whole] if isinstance(whole, dict) else whole
    if not isinstance(items, list) or not items:
        return None
    items = [decoded(item) for item in items]
    return (items, fields) if all(isinstance(item, dict) and _is_message(item) for item in items) else None


def _is_message(item: dict[str, Any]) -> bool:
    if isinstance(item.get("content"), list | str) and _speaker(item) is not None:
        return True
    if "role" in item:
        return True
    return _speaker(item) is not None and any(name in item for name in (*SAID, "data", "kwargs"))


def _speaker(item: dict[str, Any]) -> Any:
    """The role as the file spells it; LangChain gives it as the type of a message."""
    named = next((item[name] for name in SPEAKERS if item.get(name) is not None), None)
    if isinstance(named, dict):
        named = named.get("role")
    kind = item.get("type")
    if named is None and isinstance(kind, str) and role_named(kind, "") in (USER, ASSISTANT, SYSTEM, TOOL):
        return kind
    return named


def _read(item: dict[str, Any], form: TemplateForm, where: str) -> list[dict[str, Any]]:
    """Normalise a message; tool results inside a user's message become separate messages."""
    spelled = _speaker(item)
    inner = next((item[name] for name in ("data", "kwargs") if isinstance(item.get(name), dict)), None)
    if inner is not None and "role" not in item:
        item = inner
    said = next((item[name] for name in SAID if item.get(name) is not None), None)
    if not isinstance(spelled, str):
        # Leave it to the template, which gives the better error message.
        return [{**item, "content": said or ""}]
    if spelled.casefold() in UNREAD:
        return []
    role = role_named(spelled, form.source)
    if role is None:
        raise RowFileError(
            f"{where}: expected the role {EXPECTED}, or one of the chat template, received {quoted(spelled)}; rename it"
        )
    calls = [] if role == TOOL else _calls_of(item, where)
    if role == CALLS:
        role, written = ASSISTANT, decoded(said)
        if isinstance(written, dict | list):
            calls, said = read_calls(written, where), None
    blocks = read_blocks(said, role, where)
    calls += [call for one in blocks.calls for call in read_calls(one, where)]
    dropped = {*SPEAKERS, *SAID, "tool_calls", "function_call", "type"}
    kept = {name: value for name, value in item.items() if value is not None and name not in dropped}
    message = {"role": role, "content": blocks.content, **kept}
    if calls:
        message["tool_calls"] = calls
    results = [
        {"role": TOOL, "content": text} | ({"tool_call_id": name} if name else {}) for name, text in blocks.results
    ]
    is_empty = results and not blocks.parts and not calls and not blocks.thoughts
    return results if is_empty else [*results, form.fitted(message, blocks.thoughts)]


def _calls_of(item: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Calls in the field `tool_calls` of a message, or in `function_call`, OpenAI's older one."""
    extra = item.get("additional_kwargs")
    fields = {**extra, **item} if isinstance(extra, dict) else item
    for name in ("tool_calls", "function_call"):
        if not is_nothing(fields.get(name)):
            return read_calls(fields[name], f"{where}, {name}")
    return []
