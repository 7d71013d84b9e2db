"""What clients make of an answer before they send it back: another form, the same meaning."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tree_rl.rollout.gateway.protocols import anthropic_messages, openai_chat
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of several forms."""
NEW_IDS: Sequence[Callable[[str], str]] = (lambda old: old, lambda old: f"toolu_{old}", lambda old: "call_0")
"""How a client names tool calls: as they came, in its own way, or all alike."""


def as_javascript(value: Any) -> Any:
    """JSON after JavaScript has read and written it: its numbers are floats, and whole ones have no point."""
    if isinstance(value, dict):
        return {key: as_javascript(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_javascript(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if float(value).is_integer() and abs(value) < 1e21 else float(value)
    return value


def arguments_of(call: CalledTool, choose: Choose) -> Any:
    given, text = json.loads(call.arguments_json), call.arguments_json
    tight, pretty = json.dumps(given, separators=(",", ":")), json.dumps(given, sort_keys=True, indent=2)
    others = (json.dumps(one, ensure_ascii=False) for one in (dict(reversed(given.items())), as_javascript(given)))
    return choose([text, tight, pretty, *others, given])


def thoughts_of(message: ChatMessage, choose: Choose) -> str | None:
    thought = message.reasoning
    return choose([None, "", thought, thought.strip()]) if thought else choose([None, "", thought])


def texts_of(message: ChatMessage, choose: Choose) -> Any:
    text = message.content
    part = {"type": "text", "text": text}
    forms = [text, text.strip(), f"{text}\n", [part], [{"type": "text", "text": ""}, part]]
    return choose(forms + ([None, []] if not text.strip() else []))


def given_form(message: ChatMessage, choose: Choose, **fields: str) -> dict[str, Any]:
    """A message that no model wrote, or one result."""
    return {**fields, "content": choose([message.content, [{"type": "text", "text": message.content}]])}


def openai_form(message: ChatMessage, choose: Choose, new_id: Callable[[str], str]) -> dict[str, Any]:
    if message.role != "assistant":
        ids = {"tool_call_id": new_id(message.tool_call_id or "")} if message.role == "tool" else {}
        return given_form(message, choose, role=message.role, **ids)
    extra = choose([{}, {"refusal": None, "annotations": [], "audio": None, "function_call": None}, {"name": "m"}])
    body = {"role": "assistant", "content": texts_of(message, choose), **extra}
    thought = thoughts_of(message, choose)
    if thought is not None:
        body[choose(["reasoning_content", "reasoning"])] = thought
    if message.tool_calls or choose([True, False]):
        body["tool_calls"] = [
            {
                "id": new_id(call.id),
                **choose([{"type": "function"}, {"index": 0}]),
                "function": {"name": call.name, "arguments": arguments_of(call, choose)},
            }
            for call in message.tool_calls
        ]
    return body


def anthropic_form(message: ChatMessage, choose: Choose, new_id: Callable[[str], str]) -> dict[str, Any]:
    if message.role == "tool":
        block = given_form(message, choose, type="tool_result", tool_use_id=new_id(message.tool_call_id or ""))
        return {"role": "user", "content": [block]}
    if message.role != "assistant":
        return given_form(message, choose, role=message.role)
    thought = thoughts_of(message, choose)
    blocks = [] if thought is None else [{"type": "thinking", "thinking": thought, "signature": ""}]
    if message.content.strip() or not message.tool_calls:
        blocks.append({"type": "text", "text": choose([message.content, message.content.strip()])})
    for call in message.tool_calls:
        given = json.loads(call.arguments_json)
        form = choose([given, dict(reversed(given.items())), as_javascript(given)])
        blocks.append({"type": "tool_use", "id": new_id(call.id), "name": call.name, "input": form})
    return {"role": "assistant", "content": blocks}


def sent_back(history: Sequence[ChatMessage], choose: Choose, protocol: str, new_id: Callable[[str], str]) -> Any:
    """The history as the gateway reads it once a client has sent it in forms of its choice."""
    if protocol == "openai":
        body = {"model": "m", "messages": [openai_form(one, choose, new_id) for one in history]}
        return openai_chat.read_request(json.loads(json.dumps(body))).messages
    messages: list[dict[str, Any]] = []
    for one in history:
        form = anthropic_form(one, choose, new_id)
        if one.role == "tool" and messages[-1]["role"] == "user":  # Anthropic's results stand in one message
            messages[-1]["content"] += form["content"]
        elif one.role == "assistant" and choose([False, True]):  # a message of its own for each block
            messages += [{"role": "assistant", "content": [block]} for block in form["content"]]
        else:
            messages.append(form)
    body = {"model": "m", "max_tokens": 9, "messages": messages}
    return anthropic_messages.read_request(json.loads(json.dumps(body))).messages


def chooser(data: st.DataObject) -> Choose:
    return lambda forms: data.draw(st.sampled_from(forms))
