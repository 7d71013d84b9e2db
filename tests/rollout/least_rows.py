"""The least number of rows that a session's requests allow, from the message lists alone.

A request is a path: tools, instructions, messages. It asks for an answer behind the path. An answer that a later
request holds at this place goes on; every other one ends a branch. No gateway saves a branch that a client makes by
sending another history. Independent of the gateway: it reads the bodies itself.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from heard_requests import HeardRequest

Element = tuple[str, str]
"""Role and content of a message, or of what stands beside the messages."""


def least_rows(requests: Iterable[HeardRequest]) -> int:
    """Branches in the trie of the requests that the gateway answered. Each asks for one answer."""
    asked: Counter[tuple[Element, ...]] = Counter()
    answers: defaultdict[tuple[Element, ...], set[Element]] = defaultdict(set)
    for request in requests:
        if request.status != 200 or (path := path_of(request)) is None:
            continue
        asked[path] += 1
        for place, element in enumerate(path):
            if element[0] == "assistant":
                answers[path[:place]].add(element)
    return sum(max(0, times - len(answers[path])) for path, times in asked.items())


def path_of(request: HeardRequest) -> tuple[Element, ...] | None:
    """What a request sends, without what its protocol adds to it; None for a request that asks for no answer.

    Neighbouring parts of an answer are one element. Reasoning is left out: a gateway keeps what a client drops.
    """
    body = request.body
    beside = [("tools", json.dumps(body.get("tools") or [], sort_keys=True))]
    if request.path.endswith("/chat/completions"):
        parts = _chat(body["messages"])
    elif request.path.endswith("/messages"):
        parts = _anthropic(body)
    elif request.path.endswith("/responses"):
        parts = _responses(body)
    elif request.path.endswith((":generateContent", ":streamGenerateContent")):
        parts = _gemini(body)
    else:
        return None
    path: list[Element] = list(beside)
    for role, content in parts:
        if role == "assistant" and path[-1][0] == "assistant":
            path[-1] = (role, path[-1][1] + content)
        elif content:
            path.append((role, content))
    return tuple(path)


def _call(name: str, arguments: Any) -> Element:
    given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return "assistant", f"[{name} {json.dumps(given, sort_keys=True)}]"


def _text(content: Any) -> str:
    """Text of a message's content; what is no text by its JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part["text"] if "text" in part else json.dumps(part, sort_keys=True) for part in content]
    return "\n".join(texts)


def _chat(messages: Sequence[Mapping[str, Any]]) -> Iterator[Element]:
    for message in messages:
        if message["role"] != "assistant":
            yield message["role"], _text(message["content"])
            continue
        yield "assistant", _text(message.get("content")).strip()
        for call in message.get("tool_calls") or ():
            yield _call(call["function"]["name"], call["function"]["arguments"])


def _anthropic(body: Mapping[str, Any]) -> Iterator[Element]:
    yield "system", _text(body.get("system"))
    for message in body["messages"]:
        content = message["content"]
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if block["type"] == "tool_use":
                yield _call(block["name"], block["input"])
            elif block["type"] == "tool_result":
                yield "tool", _text(block.get("content"))
            elif block["type"] == "text":
                is_answer = message["role"] == "assistant"
                yield message["role"], block["text"].strip() if is_answer else block["text"]


def _responses(body: Mapping[str, Any]) -> Iterator[Element]:
    if body.get("previous_response_id"):
        raise ValueError("previous_response_id: expected a client that sends its whole history")
    yield "system", body.get("instructions") or ""
    for item in body["input"]:
        kind = item.get("type", "message")
        if kind == "message":
            text = _text(item["content"])
            yield item["role"], text.strip() if item["role"] == "assistant" else text
        elif kind == "function_call":
            yield _call(item["name"], item["arguments"])
        elif kind == "custom_tool_call":
            yield "assistant", f"[{item['name']} {item['input']}]"
        elif kind.endswith("_output"):
            yield "tool", _text(item["output"])


def _gemini(body: Mapping[str, Any]) -> Iterator[Element]:
    yield "system", _text((body.get("systemInstruction") or {}).get("parts"))
    for content in body["contents"]:
        role = "assistant" if content.get("role") == "model" else "user"
        for part in content["parts"]:
            if "functionCall" in part:
                yield _call(part["functionCall"]["name"], part["functionCall"].get("args"))
            elif "functionResponse" in part:
                yield "tool", json.dumps(part["functionResponse"]["response"], sort_keys=True)
            elif "text" in part and not part.get("thought"):
                yield role, part["text"].strip() if role == "assistant" else part["text"]
