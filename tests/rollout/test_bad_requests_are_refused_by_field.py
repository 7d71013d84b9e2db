"""A request that the gateway cannot answer is refused in its protocol's form, and the message names the field.

Every field that OpenAI's and Anthropic's SDKs can send is honoured, without effect or refused, as the docs say.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from drawn_values import QUESTION, READERS, TOOLS, asked
from gateway_harness import SHELL, talking, user
from openai.types.chat import completion_create_params

from tree_rl.rollout.gateway.protocols import anthropic_messages, gemini, openai_chat
from tree_rl.rollout.gateway.protocols.fields import Fields, RequestError, read_json
from tree_rl.rollout.gateway.protocols.request_fields import CHAT_FIELDS, MESSAGE_FIELDS, FieldTreatment, check_fields

FORMS: dict[str, Callable[[RequestError], dict[str, Any]]] = {
    "chat": openai_chat.error_body,
    "messages": anthropic_messages.error_body,
    "responses": openai_chat.error_body,
    "gemini": gemini.error_body,
}
CODES = {"gemini": {"code": 400, "status": "INVALID_ARGUMENT"}}
HOLOGRAM = {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "chat": [
        (b"{", "expected JSON"),
        (b'{"messages": NaN}', "NaN"),
        (b"\xff\xfe{}", "expected UTF-8, received byte 0xff at 0"),
        (b"[" * 100_000, "nested too deep"),
        (b"[]", "body: expected a JSON object"),
        ({"messages": None}, "messages: expected a list, received nothing"),
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected a list, received 3"),
        ({"messages": [{"role": "cat", "content": ""}]}, "messages[0].role: expected system, developer, user"),
        (HOLOGRAM, "messages[0].content[0].type: expected text, received a part of type 'hologram'"),
        ({"temperature": "hot"}, "temperature: expected a number from 0.0 to 2.0"),
        ({"n": 0}, "n: expected a whole number of at least 1"),
        ({"max_tokens": -1}, "max_tokens: expected a whole number"),
        ({"stop": [3]}, "stop: expected a text or a list of texts"),
        ({"stream": "yes"}, "stream: expected true or false"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: expected a JSON object"),
        ({"tool_choice": "required", "tools": None}, "tool_choice: expected one of the offered tools (no tools)"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [SHELL]},
            "tool_choice.function.name: expected one of the offered tools (shell), received 'x'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema: expected a JSON schema",
        ),
        ({"response_format": {"type": "grammar"}}, "response_format.type: expected text, json_object"),
        ({"top_logprobs": 5}, "top_logprobs: expected 0"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex: the gateway constrains"),
        ({"modalities": ["text", "audio"]}, "modalities: expected only text"),
        ({"continue_final_message": True}, "continue_final_message: expected a last message"),
        ({"logit_bias": {"5": 1}}, "logit_bias: not supported"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages: expected Unicode text"),
    ],
    "messages": [
        ({"max_tokens": None}, "max_tokens: expected a whole number of at least 1, received nothing"),
        ({"messages": None}, "messages: expected a list, received nothing"),
        (HOLOGRAM, "messages[0].content[0].type: expected text, image, document or tool_result, received 'hologram'"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema: expected a JSON schema"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools[0].type: expected a tool with an input_schema, received the built-in 'bash_20250124'",
        ),
        (
            {"tool_choice": {"type": "any"}, "tools": None},
            "expected one of the offered tools (no tools), received 'any'",
        ),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported"),
    ],
    "responses": [
        ({"input": []}, "input: expected at least one item"),
        ({"input": None}, "input: expected a list, received nothing"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type: expected one of message, reasoning"),
        ({"input": [{"role": "cat", "content": ""}]}, "input[0].role: expected user, assistant, system, developer"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type: expected text"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
            "input[0].encrypted_content: expected a token that this gateway gave",
        ),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type: expected function, custom or namespace"),
        ({"tools": [{"type": "mcp"}]}, "received the built-in 'mcp'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools of different names"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": 3}]},
            "tools[0].parameters: expected a JSON schema",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type: expected function, custom or allowed_tools"),
        ({"tool_choice": {"type": "function", "name": "cat"}}, "tool_choice.name: expected one of the offered tools"),
        ({"tool_choice": "required", "tools": []}, "(no tools)"),
        ({"truncation": "auto"}, "truncation: expected disabled"),
        ({"conversation": "c"}, "conversation: not supported"),
        ({"prompt": {"id": "p"}}, "prompt: not supported"),
        ({"context_management": [{"type": "compaction"}]}, "context_management: not supported"),
        ({"include": ["everything"]}, "include: expected some of"),
        ({"top_logprobs": 3}, "top_logprobs: expected a whole number of at least 0 and at most 0"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type: expected text, json_object or json_schema"),
        ({"background": True, "stream": True}, "background: expected a stored response"),
        ({"max_output_tokens": 0}, "max_output_tokens: expected a whole number of at least 1"),
    ],
    "gemini": [
        ({"contents": None}, "contents: expected a list"),
        ({"contents": []}, "contents: expected at least one content"),
        ({"contents": [{"role": "cat", "parts": []}]}, "contents[0].role: expected user, model, function"),
        ({"contents": [{"parts": [{"executable_code": {}}]}]}, "contents[0].parts[0].text: expected a part with text"),
        ({"tools": [{"google_search": {}}]}, "tools[0].googleSearch: only Google runs"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}, "tools": None}, "(no tools)"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "expected text/plain or"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "expected TEXT"),
        ({"generationConfig": {"speechConfig": {"a": 1}}}, "generationConfig.speechConfig: not supported"),
        ({"cachedContent": "x"}, "cachedContent: not supported"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens: expected a whole number"),
    ],
}


@pytest.mark.parametrize(
    ("protocol", "body", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_bad_requests_are_refused_by_field(protocol: str, body: Any, message: str) -> None:
    if isinstance(body, dict):
        body = json.dumps(asked(protocol, body)).encode()
    with pytest.raises(RequestError) as caught:
        READERS[protocol](read_json(body))
    assert caught.value.status == 400
    error = FORMS[protocol](caught.value)["error"]
    assert message in error["message"]
    assert CODES.get(protocol, {"type": "invalid_request_error"}).items() <= error.items()
    named = message.split(":")[0] if ": expected" in message or ": not" in message else None
    assert protocol != "chat" or named in (None, "body") or error["param"] == named


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
LONG = {"max_tokens": 5, "messages": [user("long " * 9000)]}
LARGE = {"messages": [user("x" * (10 << 20))]}
IN_JSON = {**QUESTION, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": {}}}}


@pytest.mark.parametrize(
    ("path", "sent", "status", "kind", "message"),
    [
        (CHAT, b"{", 400, "invalid_request_error", "expected JSON"),
        (MESSAGES, LONG, 400, "invalid_request_error", "prompt is too long: "),
        (MESSAGES, IN_JSON, 400, "invalid_request_error", "output_config.format.schema: expected text"),
        (CHAT, LARGE, 413, "invalid_request_error", "at most 1048576 bytes"),
        (MESSAGES, LARGE, 413, "request_too_large", "at most 1048576 bytes"),
    ],
)
async def test_a_refused_call_is_counted_and_not_recorded(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, path: str, sent: Any, status: int, kind: str, message: str
) -> None:
    """Its client reads the answer, also while it is still sending."""
    monkeypatch.setattr("tree_rl.rollout.gateway.protocols.request_body.MAX_BODY_BYTES", 1 << 20)
    async with talking(tiny.backend()) as talk:
        body = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        answer = await talk.http.post(path, content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, kind) and message in error["message"]
    assert talk.record.calls == () and talk.record.refused == {status: 1}


PAGE = Path(__file__).parents[2] / "docs" / "request_fields.md"


@pytest.mark.parametrize(
    ("sent", "treated"),
    [
        (completion_create_params.CompletionCreateParamsStreaming, CHAT_FIELDS),
        (message_create_params.MessageCreateParamsStreaming, MESSAGE_FIELDS),
        (beta_message_create_params.MessageCreateParamsStreaming, MESSAGE_FIELDS),
        (message_count_tokens_params.MessageCountTokensParams, MESSAGE_FIELDS),
    ],
)
def test_every_field_of_the_sdks_is_treated(sent: Any, treated: Mapping[str, FieldTreatment]) -> None:
    assert set(get_type_hints(sent)) - set(treated) == set()


@pytest.mark.parametrize(("title", "treated"), [("OpenAI", CHAT_FIELDS), ("Anthropic", MESSAGE_FIELDS)])
def test_the_docs_show_every_treatment(title: str, treated: Mapping[str, FieldTreatment]) -> None:
    (section,) = (part for part in PAGE.read_text().split("\n## ") if part.startswith(f"Fields of {title}"))
    shown: dict[str, tuple[str, str]] = {}
    for item in section.split("\n* ")[1:]:
        found = re.fullmatch(r"(.*) \((honoured|no effect|refused)\): (.+)", " ".join(item.split()))
        assert found, item
        shown |= dict.fromkeys(re.findall(r"`(\w+)`", found[1]), (found[2], found[3]))
    assert {name: effect for name, (effect, _) in shown.items()} == {name: one.effect for name, one in treated.items()}
    assert all(shown[name][1] == one.note for name, one in treated.items() if one.effect == "refused")


def test_refused_fields_are_refused_only_where_they_ask_for_something() -> None:
    for treated in (CHAT_FIELDS, MESSAGE_FIELDS):
        for name, one in treated.items():
            if one.effect == "refused":
                with pytest.raises(RequestError, match=name):
                    check_fields(Fields({name: [1]}), treated)
            for value in (None, False, 0, [], {}, "", *one.neutral):
                assert check_fields(Fields({name: value}), treated) == ()
    assert check_fields(Fields({"sparkle": 1, "n": 2}), CHAT_FIELDS) == ("field sparkle",)
