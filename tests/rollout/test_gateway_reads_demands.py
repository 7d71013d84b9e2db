"""Demands, parts that no text model sees and unknown fields, as the Responses API and Gemini spell them."""

from functools import partial
from typing import Any

import pytest
from drawn_values import NAMES, READERS, TOOLS, VALUES, asked
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from tree_rl.rollout.gateway.protocols import gemini
from tree_rl.rollout.gateway.protocols.demands import ANY_OBJECT
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.openai_responses import requests as responses_requests
from tree_rl.rollout.gateway.tokens.images import without_images

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def read_asked(protocol: str, **fields: Any) -> Any:
    return READERS[protocol](asked(protocol, fields))


chat, message, respond, generate = (partial(read_asked, name) for name in READERS)


def calling(**config: Any) -> Any:
    return generate(tool_config={"function_calling_config": config})


def offered(request: Any) -> tuple[str, ...]:
    return tuple(tool["function"]["name"] for tool in request.tools)


def test_a_choice_of_tools_is_read() -> None:
    spawn = {"type": "function", "name": "spawn", "namespace": "agents"}
    patch = {"type": "custom", "name": "apply_patch"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [patch, spawn]}
    named = [{"type": "function", "function": {"name": name}} for name in NAMES[:2]]
    for request, kept, must_call in (
        (chat(), NAMES, ()),
        (chat(tool_choice="required"), NAMES, NAMES),
        (chat(tool_choice=named[0]), NAMES, ("shell",)),
        (chat(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}), NAMES[:2], ()),
        (message(), NAMES, ()),
        (message(tool_choice={"type": "any"}), NAMES, NAMES),
        (message(tool_choice={"type": "tool", "name": "shell"}), NAMES, ("shell",)),
        (respond(), NAMES, ()),
        (respond(tool_choice="auto"), NAMES, ()),
        (respond(tool_choice="none"), (), ()),
        (respond(tool_choice="required"), NAMES, NAMES),
        (respond(tool_choice=patch), NAMES, ("apply_patch",)),
        (respond(tool_choice=spawn), NAMES, ("agents__spawn",)),
        (respond(tool_choice=allowed), NAMES[1:], ()),
        (respond(tool_choice={**allowed, "mode": "required"}), NAMES[1:], NAMES[1:]),
        (generate(), NAMES, ()),
        (calling(mode="AUTO"), NAMES, ()),
        (calling(mode="VALIDATED"), NAMES, ()),
        (calling(mode="NONE"), (), ()),
        (calling(mode="ANY"), NAMES, NAMES),
        (calling(mode="ANY", allowed_function_names=["shell"]), NAMES, ("shell",)),
        (calling(mode="ANY", allowed_function_names=list(NAMES[:2])), NAMES[:2], NAMES[:2]),
    ):
        assert (offered(request), request.must_call) == (kept, must_call)
    for read in (respond, chat):
        assert read(parallel_tool_calls=False).one_call and not read(parallel_tool_calls=True).one_call
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert message(tool_choice=alone).one_call and not message(tool_choice={"type": "auto"}).one_call


def test_a_demand_for_json_is_read() -> None:
    json_type = {"responseMimeType": "application/json"}
    capitals = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    for request, schema in (
        (respond(text={"format": {"type": "text"}, "verbosity": "low"}), None),
        (respond(text={"format": {"type": "json_object"}}), ANY_OBJECT),
        (respond(text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}), SCHEMA),
        (generate(generationConfig={"responseMimeType": "text/plain"}), None),
        (generate(generationConfig=json_type), ANY_OBJECT),
        (generate(generationConfig={**json_type, "responseJsonSchema": SCHEMA}), SCHEMA),
        (generate(generationConfig={**json_type, "response_schema": capitals}), SCHEMA),
    ):
        assert (request.json and request.json.schema) == schema


def test_what_a_text_model_does_not_see_becomes_a_line() -> None:
    lines = ["[image left out: this model reads text alone]", "[file: a.pdf left out: this model reads text alone]"]
    parts = [{"type": "input_image", "image_url": "data:"}, {"type": "input_file", "filename": "a.pdf"}]
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}, *parts]}
    image = {"inlineData": {"mimeType": "image/png", "data": ""}}
    seen = [image, {"file_data": {"mime_type": "application/pdf", "displayName": "a.pdf"}}]
    result = {"functionResponse": {"name": "f", "response": {"output": "a"}, "parts": seen}}
    contents = [{"role": "user", "parts": seen}, {"role": "user", "parts": [result]}]
    for request in (respond(input=[{"role": "user", "content": parts}, output]), generate(contents=contents)):
        shown = without_images(request)
        assert [message.content for message in shown.messages] == ["\n".join(lines), "\n".join(["a", *lines])]
        assert shown.left_out == ("file", "image")


def test_images_and_documents_of_anthropic_become_a_line() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    pdf = {"type": "document", "title": "a.pdf", "source": {**image["source"], "media_type": "application/pdf"}}
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "plain words"}}
    hit = {"type": "text", "text": "hit"}
    found = {"type": "search_result", "source": "https://a.b", "title": "t", "content": [hit]}
    use = {"type": "tool_use", "id": "x", "name": "shell", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image, {"type": "text", "text": "seen"}]}
    sent = [("user", [image, pdf, plain, found]), ("assistant", [use]), ("user", [result])]
    messages = [{"role": role, "content": content} for role, content in sent]
    request = without_images(message(messages=messages))
    question, _, output = (one.content for one in request.messages)
    line = "[image left out: this model reads text alone]"
    assert question.startswith(f"{line}\n[document: a.pdf left out: this model reads text alone]\n")
    assert "plain words" in question and "hit" in question and output == f"{line}\nseen"
    assert sorted(request.left_out) == ["document", "image"]


def test_unknown_fields_are_named_and_known_ones_are_the_sdks() -> None:
    assert respond(brand_new=1, store=False).left_out == ("field brand_new",)
    request = generate(brand_new=1, generation_config={"newer": 2, "topK": 3.0})
    assert request.left_out == ("field brandNew", "field generationConfig.newer")
    assert {*ResponseCreateParamsBase.__annotations__, "stream"} <= responses_requests.KNOWN.keys()
    types = pytest.importorskip("google.genai.types", reason="google-genai is not installed")
    assert {gemini.camel(name) for name in types.GenerationConfig.model_fields} <= gemini.KNOWN_CONFIG.keys()


RESPONSES_BODY = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}, {"type": "input_image"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": ""},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}]},
    "text": {"format": {"type": "json_schema", "schema": {}}},
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "instructions": "i",
    "max_output_tokens": 3,
}
GEMINI_BODY = {
    "contents": [
        {"role": "user", "parts": [{"text": "q"}, {"inlineData": {"mimeType": "image/png"}}]},
        {"role": "model", "parts": [{"text": "t", "thought": True}, {"functionCall": {"name": "f", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "o"}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "s"}]},
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {}}}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "responseMimeType": "application/json",
        "responseSchema": {},
        "stopSequences": ["a"],
        "topK": 3,
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in parts for place in places(part, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A body with another value at a path."""
    if not path:
        return new
    part = changed(value[path[0]], path[1:], new)
    if isinstance(value, dict):
        return {**value, path[0]: part}
    return [*value[: path[0]], part, *value[path[0] + 1 :]]


@settings(max_examples=60)
@given(st.data(), VALUES)
def test_any_value_anywhere_is_read_or_refused(data: st.DataObject, new: Any) -> None:
    for protocol, body in (("responses", RESPONSES_BODY), ("gemini", GEMINI_BODY)):
        sent = changed(body, data.draw(st.sampled_from(places(body))), new)
        try:
            READERS[protocol](sent)
        except RequestError as error:
            assert error.status in (400, 404)
