"""A request that repeats an earlier one and goes on is read as if it were the first."""

import json
from typing import Any

import pytest
from hostile_conversations import EDITS, conversations, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.rollout.gateway import anthropic_api, openai_api
from tree_rl.rollout.gateway.fields import Fields, RequestError, read_json
from tree_rl.rollout.gateway.messages import ChatMessage
from tree_rl.rollout.gateway.request_memory import RequestMemory

DAMAGE = st.sampled_from(
    [
        lambda text: text,
        lambda text: text,
        lambda text: text[:-1],
        lambda text: text.replace("}, {", "} , \n{"),
        lambda text: text.replace("}, {", "},,{", 1),
        lambda text: text.replace("}, {", "} {", 1),
        lambda text: text.replace("}], ", "},], ", 1),
        lambda text: text[:-1] + ', "messages": [{"role": "user", "content": "last wins"}]}',
        lambda text: text[:-1] + ', "messages": null}',
        lambda text: text[:-1] + ', "m\\u0065ssages": [{"role": "user", "content": "spelled otherwise"}]}',
        lambda text: text[:-1] + ', "metadata": {"messages": [{"role": "nobody"}]}}',
        lambda text: '{"metadata": {"messages": [{"role": "nobody"}]}, ' + text[1:],
        lambda text: '{"metadata": "\\"messages\\": [", ' + text[1:],
        lambda text: text[:-1] + ', "x": NaN}',
        lambda text: text.replace('"so"', '"\\ud800"'),
        lambda text: text.replace('"so"', "NaN"),
        lambda text: text.replace('"so"', "7"),
        lambda text: text.replace("}], ", "}, 7], ", 1),
        lambda text: text.replace("so", "so\\u00fc\\n"),
        lambda text: f" \n{text} ",
        lambda text: f"[{text}]",
        lambda text: "\ufeff" + text,
    ]
)


@given(st.lists(st.tuples(EDITS, DAMAGE), max_size=12))
@settings(max_examples=150)
def test_a_body_is_read_as_if_it_were_the_first(steps: list[tuple[Any, Any]]) -> None:
    memories = {openai_api: RequestMemory(), anthropic_api: RequestMemory()}
    sent = conversations([edit for edit, _ in steps])
    for (messages, tools), (_, damage) in zip(sent, [(None, str), *steps], strict=True):
        text = damage(
            json.dumps({"model": "m", "max_tokens": 4, "messages": messages, "tools": tools, "stream": False})
        )
        body = text.encode("utf-8")
        for api, memory in memories.items():

            def remembering(api: Any = api, memory: RequestMemory = memory, body: bytes = body) -> Any:
                decoded, heard = memory.load(body)
                # Not by ==, to which 1, 1.0 and True are one.
                written = json.dumps(decoded)
                request = api.read_request(decoded, heard)
                memory.keep(heard)
                return written, repr(request)

            def forgetful(api: Any = api, body: bytes = body) -> Any:
                decoded = read_json(body)
                return json.dumps(decoded), repr(api.read_request(decoded))

            assert outcome(remembering) == outcome(forgetful)


def test_no_changed_character_is_overlooked() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
    messages = [{"role": "user", "content": "so"}, {"content": "a", "tool_calls": [call], "role": "assistant"}]
    text = json.dumps({"model": "m", "messages": [*messages, *messages]})
    for position, character in enumerate(text):
        memory = RequestMemory()
        decoded, heard = memory.load(text.encode())
        openai_api.read_request(decoded, heard)
        memory.keep(heard)
        for other in ("x", "2", '"', "}", " ", ""):
            body = f"{text[:position]}{other}{text[position + len(character) :]}".encode()

            def again(memory: RequestMemory = memory, body: bytes = body) -> Any:
                decoded, heard = memory.load(body)
                return json.dumps(decoded), repr(openai_api.read_request(decoded, heard))

            def anew(body: bytes = body) -> Any:
                decoded = read_json(body)
                return json.dumps(decoded), repr(openai_api.read_request(decoded))

            assert outcome(again) == outcome(anew)


def test_bytes_that_are_no_text_are_refused_whatever_came_before() -> None:
    memory = RequestMemory()
    decoded, heard = memory.load(b'{"messages": [{"role": "user", "content": "x"}]}')
    openai_api.read_request(decoded, heard)
    memory.keep(heard)
    with pytest.raises(RequestError, match="expected UTF-8, received byte 0xff"):
        memory.load(b'{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "\xff"}]}')


def test_known_messages_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = openai_api._message

    def reading(fields: Fields) -> ChatMessage:
        read.append(fields.name(""))
        return original(fields)

    monkeypatch.setattr(openai_api, "_message", reading)
    memory = RequestMemory()
    messages = [{"role": "user", "content": f"question {number}"} for number in range(5)]
    for count in (2, 3, 5):
        decoded, heard = memory.load(json.dumps({"model": "m", "messages": messages[:count]}).encode())
        assert len(openai_api.read_request(decoded, heard).messages) == count
        memory.keep(heard)
    assert read == [f"messages[{number}]." for number in range(5)]
