"""Answers are what the clients' SDKs write; those of the Responses API and Gemini read back as the same message."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from dictated_answers import answered, completed
from drawn_values import TEXTS, TOOLS, VALUES
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tree_rl.rollout.gateway.protocols import anthropic_messages, gemini, openai_chat, openai_responses
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.fields import read_json
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.protocols.sealed_reasoning import seal, unseal

NAMES = st.sampled_from(["shell", "apply_patch", "agents__spawn", "nobody"])
ARGUMENTS = st.one_of(st.dictionaries(TEXTS, VALUES, max_size=2), st.builds(lambda v: {"input": v}, VALUES))
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3).map(
    lambda drawn: tuple(CalledTool(id=f"call_{n}", name=name, arguments=args) for n, (name, args) in enumerate(drawn))
)
THOUGHTS = st.one_of(st.none(), TEXTS.filter(bool))
MESSAGES = st.builds(ChatMessage, role=st.just("assistant"), content=TEXTS, reasoning=THOUGHTS, tool_calls=CALLS)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def asked(*items: Any, remembered: Any = None, **fields: Any) -> Any:
    body = {"model": "m", "input": [{"role": "user", "content": "q"}, *items], "tools": TOOLS, **fields}
    read = read_json(json.dumps(body).encode())
    return openai_responses.read_request(read, remembered or openai_responses.StoredResponses())


def without(part: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A part, and its call, as a client sends them back that drops some fields."""
    kept = {key: value for key, value in part.items() if key not in keys}
    return {key: without(value, *keys) if key == "functionCall" else value for key, value in kept.items()}


def called_by(message: ChatMessage) -> list[tuple[str, Any]]:
    return [(one.name, one.arguments) for one in message.tool_calls]


def events_of(written: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in written.decode().split("\n") if line.startswith("data: {")]


@settings(max_examples=60)
@given(st.lists(MESSAGES, min_size=1, max_size=3), TEXTS, st.booleans())
def test_chat_completions_are_what_the_sdk_writes(
    messages: list[ChatMessage], model: str, with_log_probs: bool
) -> None:
    choices = tuple(
        replace(*completed(message).choices, **({} if with_log_probs else {"tokens": None})) for message in messages
    )
    request = ChatRequest(model=model, messages=(), count=len(choices), with_log_probs=with_log_probs)
    written = openai_chat.answer(request, replace(completed(messages[0]), choices=choices))
    made = ChatCompletion.model_validate(written).model_dump(mode="json", exclude_unset=True)
    assert json.loads(json.dumps(written)) == made
    for event in events_of(b"".join(openai_chat.stream(request, completed(messages[0])))):
        assert ChatCompletionChunk.model_validate(event).model_dump(mode="json", exclude_unset=True) == event


@settings(max_examples=30)
@given(MESSAGES, st.sampled_from(["stop", "length", "tool_calls", "stop_sequence"]))
def test_messages_are_what_the_sdk_writes(message: ChatMessage, cause: Any) -> None:
    request = ChatRequest(model="m", messages=())
    written = anthropic_messages.answer(request, completed(message, cause))
    assert Message.model_validate(written).model_dump(mode="json", exclude_unset=True) == written
    for event in events_of(b"".join(anthropic_messages.stream(request, completed(message, cause)))):
        made = MESSAGE_EVENTS.validate_python(event)
        assert made.model_dump(mode="json", exclude_unset=True) == event and made.type == event["type"]


@settings(max_examples=30)
@given(MESSAGES, st.sampled_from(["stop", "length", "tool_calls"]), st.booleans())
def test_responses_are_what_the_sdk_writes(message: ChatMessage, cause: Any, with_summary: bool) -> None:
    request = asked(include=["reasoning.encrypted_content"], reasoning={"summary": "auto" if with_summary else None})
    written = openai_responses.answer(request, completed(message, cause))
    made = Response.model_validate(written)
    assert json.loads(json.dumps(written)) == made.model_dump(mode="json", exclude_unset=True, by_alias=True)
    for event in events_of(b"".join(openai_responses.stream(request, completed(message, cause)))):
        parsed = EVENTS.validate_python(event)
        assert type(parsed).model_validate(event) == parsed and parsed.type == event["type"]
    cut = {"reason": "max_output_tokens"} if cause == "length" else None
    status = "incomplete" if cut else "completed"
    assert (parsed.type, written["status"], written["incomplete_details"]) == (f"response.{status}", status, cut)
    assert all(item.get("status", status) == status for item in written["output"][-1:])


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "whole": dict,
    # As Codex sends reasoning back.
    "token alone": lambda item: {**item, "content": None} if item["type"] == "reasoning" else item,
    # Some clients know no namespaces.
    "plain": lambda item: {key: value for key, value in item.items() if key not in ("id", "status", "namespace")},
    # As Vercel's client sends items back that are stored.
    "reference": lambda item: {"type": "item_reference", "id": item["id"]},
}
"""What clients make of an item before they send it back."""


@settings(max_examples=60)
@given(MESSAGES, st.booleans(), st.sampled_from(list(FORMS)))
def test_output_items_read_back_as_the_message(message: ChatMessage, is_stream: bool, form: str) -> None:
    request = asked(include=["reasoning.encrypted_content"] if form == "token alone" else [])
    stored = openai_responses.StoredResponses()
    stored.remember(request, answered(completed(message)))
    if is_stream:
        events = events_of(b"".join(openai_responses.stream(request, completed(message))))
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    else:
        items = openai_responses.answer(request, completed(message))["output"]
    sent = [FORMS[form](item) for item in items]
    (_, again, _) = asked(*sent, {"role": "user", "content": "on"}, remembered=stored).messages
    assert again == message
    (*_, again, _) = asked(remembered=stored, previous_response_id=request.response_id, input="on").messages
    assert again == message
    # Results may stand between the calls.
    results = {item["id"]: {"type": f"{item['type']}_output", "call_id": item.get("call_id")} for item in items}
    called = [{**results[item["id"]], "output": "o"} if "call_id" in item else None for item in items]
    mixed = [part for pair in zip(sent, called, strict=True) for part in pair if part]
    (_, again, *outputs) = asked(*mixed, remembered=stored).messages
    assert again == message and len(outputs) == len(message.tool_calls)


CUSTOM, FUNCTION = {"type": "custom_tool_call"}, {"type": "function_call"}


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("apply_patch", {"input": '*** ü\n"x"'}, {**CUSTOM, "name": "apply_patch", "input": '*** ü\n"x"'}),
        ("apply_patch", {"patch": "x"}, {**CUSTOM, "name": "apply_patch", "input": '{"patch": "x"}'}),
        ("apply_patch", {"input": ["x"]}, {**CUSTOM, "name": "apply_patch", "input": '["x"]'}),
        ("agents__spawn", {"a": 1}, {**FUNCTION, "name": "spawn", "namespace": "agents", "arguments": '{"a": 1}'}),
        ("nobody", {}, {**FUNCTION, "name": "nobody", "arguments": "{}"}),
    ],
)
def test_custom_and_namespaced_tools_are_called_as_they_are_declared(name: str, arguments: Any, item: Any) -> None:
    message = ChatMessage(role="assistant", tool_calls=(CalledTool(id="c", name=name, arguments=arguments),))
    (called,) = openai_responses.answer(asked(), completed(message))["output"]
    assert item.items() <= called.items() and ("namespace" in called) == ("namespace" in item)


@settings(max_examples=30)
@given(MESSAGES, st.booleans(), st.booleans())
def test_gemini_parts_read_back_as_the_message(message: ChatMessage, as_events: bool, with_thoughts: bool) -> None:
    config = {"thinkingConfig": {"includeThoughts": with_thoughts}}
    question = {"role": "user", "parts": [{"text": "q"}]}

    def read(contents: list[Any]) -> Any:
        body = read_json(json.dumps({"contents": contents, "generation_config": config}).encode())
        return gemini.read_request(body, model="m", is_stream=True, as_events=as_events)

    request = read([question])
    written = b"".join(gemini.stream(request, completed(message)))
    chunks = events_of(written) if as_events else json.loads(written)
    whole = gemini.answer(request, completed(message))
    contents = [chunk["candidates"][0]["content"] for chunk in chunks]
    assert [part for content in contents for part in content["parts"]] == whole["candidates"][0]["content"]["parts"]
    assert chunks[-1]["usageMetadata"] == whole["usageMetadata"]
    answer = whole["candidates"][0]["content"]
    for sent in (contents, [answer]):
        (_, again, _) = read([question, *sent, question]).messages
        assert again == message
    for dropped in (("id",), ("id", "thoughtSignature")):
        parts = [without(part, *dropped) for part in answer["parts"]]
        (_, again, _) = read([question, {**answer, "parts": parts}, question]).messages
        assert again.content == message.content
        assert called_by(again) == called_by(message)


@given(st.text())
def test_sealed_reasoning_opens_in_both_alphabets(reasoning: str) -> None:
    reasoning = reasoning.encode("utf-8", "replace").decode()
    token = seal(reasoning)
    assert unseal(token) == unseal(token.replace("+", "-").replace("/", "_").rstrip("=")) == reasoning


@pytest.mark.parametrize("token", ["", "gAAAAABo", "skip_thought_signature_validator", "ü", "dHJlZV9ybC8xOv8="])
def test_tokens_of_others_open_nothing(token: str) -> None:
    assert unseal(token) is None
