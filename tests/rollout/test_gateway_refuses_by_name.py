"""What a gateway does not answer, it refuses with a status, in the protocol's own form, naming the field."""

import asyncio
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_harness import SHELL, serving

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.tokens.rendering import Renderer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]


def post(tiny: SimpleNamespace, path: str, content: bytes | Mapping[str, Any], **options: Any) -> httpx.Response:
    """Send one body with the session's key."""

    async def run() -> httpx.Response:
        async with serving(tiny.backend(), tiny.tokenizer, **options) as gateway:
            session = gateway.open_session()
            endpoint = gateway.endpoint(session)
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            async with httpx.AsyncClient(timeout=30) as client:
                answer = await client.post(endpoint.url + path, content=body, headers={"x-api-key": endpoint.token})
            record = await gateway.close_session(session)
            assert record.calls == () and record.refused == {answer.status_code: 1}
            return answer

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "expected JSON"),
        (b'{"messages": NaN}', "NaN"),
        (b"\xff\xfe{}", "expected UTF-8, received byte 0xff at 0"),
        (b"[" * 100_000, "nested too deep"),
        (b"[]", "body: expected a JSON object"),
        ({}, "messages: expected a list, received nothing"),
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected a list, received 3"),
        ({"messages": [{"role": "cat", "content": ""}]}, "messages[0].role: expected system, developer, user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type: expected text, received a part of type 'hologram'",
        ),
        ({"messages": HELLO, "temperature": "hot"}, "temperature: expected a number from 0.0 to 2.0"),
        ({"messages": HELLO, "n": 0}, "n: expected a whole number of at least 1"),
        ({"messages": HELLO, "max_tokens": -1}, "max_tokens: expected a whole number"),
        ({"messages": HELLO, "stop": [3]}, "stop: expected a text or a list of texts"),
        ({"messages": HELLO, "stream": "yes"}, "stream: expected true or false"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function: expected a JSON object"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice: expected one of the offered tools (no tools)"),
        (
            {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [SHELL]},
            "tool_choice.function.name: expected one of the offered tools (shell), received 'x'",
        ),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format.type: expected text"),
        (
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema: expected a JSON schema",
        ),
        (
            {"messages": HELLO, "response_format": {"type": "grammar"}},
            "response_format.type: expected text, json_object",
        ),
        ({"messages": HELLO, "top_logprobs": 5}, "top_logprobs: expected 0"),
        ({"messages": HELLO, "guided_json": {}, "guided_regex": "a"}, "guided_regex: the gateway constrains"),
        ({"messages": HELLO, "modalities": ["text", "audio"]}, "modalities: expected text alone"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message: expected a last message"),
        ({"messages": HELLO, "logit_bias": {"5": 1}}, "logit_bias: not supported"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages: expected Unicode text"),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "prompt is too long"),
    ],
)
def test_bad_openai_requests_are_refused_by_field(tiny: SimpleNamespace, body: Any, message: str) -> None:
    answer = post(tiny, CHAT, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["type"] == "invalid_request_error"
    named = message.split(":")[0] if ": expected" in message or ": not" in message else None
    assert named in (None, "body") or error["param"] == named


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "expected JSON"),
        ({"messages": HELLO}, "max_tokens: expected a whole number of at least 1, received nothing"),
        ({"max_tokens": 5}, "messages: expected a list, received nothing"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type: expected text, image, document or tool_result, received 'hologram'",
        ),
        (
            {"max_tokens": 5, "messages": HELLO, "tools": [{"name": "x"}]},
            "tools[0].input_schema: expected a JSON schema",
        ),
        (
            {"max_tokens": 5, "messages": HELLO, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools[0].type: expected a tool with an input_schema, received the built-in 'bash_20250124'",
        ),
        (
            {"max_tokens": 5, "messages": HELLO, "tool_choice": {"type": "any"}},
            "tool_choice: expected one of the offered tools (no tools), received 'any'",
        ),
        (
            {"max_tokens": 5, "messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format.schema: expected text",
        ),
        ({"max_tokens": 5, "messages": HELLO, "mcp_servers": [{"type": "url"}]}, "mcp_servers: not supported"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": "long " * 9000}]}, "prompt is too long: "),
    ],
)
def test_bad_anthropic_requests_are_refused_by_field(tiny: SimpleNamespace, body: Any, message: str) -> None:
    answer = post(tiny, MESSAGES, body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]


def test_a_large_body_is_refused_and_its_client_reads_the_answer(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.protocols.request_body.MAX_BODY_BYTES", 1 << 20)
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (10 << 20)}]}).encode()
    answer = post(tiny, CHAT, body)
    assert answer.status_code == 413 and "at most 1048576 bytes" in answer.json()["error"]["message"]
    answer = post(tiny, MESSAGES, body)
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "request_too_large"


def test_without_the_sessions_own_token_nobody_is_answered(tiny: SimpleNamespace) -> None:
    async def run() -> list[tuple[int, str]]:
        async with serving(tiny.backend(), tiny.tokenizer) as gateway:
            mine, other = gateway.open_session(), gateway.open_session()
            endpoint = gateway.endpoint(mine)
            root = endpoint.url.split("/s/")[0]
            body = {"messages": HELLO, "max_tokens": 2}
            tries: list[tuple[str, dict[str, str]]] = [
                (endpoint.url + CHAT, {}),
                (endpoint.url + CHAT, {"authorization": "Bearer wrong"}),
                (endpoint.url + CHAT, {"authorization": f"Bearer {other.token}"}),
                (endpoint.url + MESSAGES, {"x-api-key": mine.token[:-1]}),
                (root + CHAT, {"authorization": "Bearer wrong"}),
                (f"{root}/s/nowhere{CHAT}", {"x-api-key": mine.token}),
                (f"{endpoint.url}/v1/embeddings", {"x-api-key": mine.token}),
                (endpoint.url + CHAT, {"authorization": f"bearer {mine.token}"}),
                (endpoint.url + CHAT, {"x-api-key": mine.token, "x-agent-name": "a b"}),
            ]
            answers = []
            async with httpx.AsyncClient() as client:
                for url, headers in tries:
                    answer = await client.post(url, json=body, headers=headers)
                    answers.append((answer.status_code, answer.json().get("error", {}).get("type", "answered")))
                await gateway.close_session(mine)
                late = await client.post(endpoint.url + CHAT, json=body, headers={"x-api-key": mine.token})
            return [*answers, (late.status_code, late.json()["error"]["code"])]

    assert asyncio.run(run()) == [
        *[(401, "authentication_error")] * 5,
        (404, "not_found_error"),
        (404, "not_found_error"),
        (200, "answered"),
        (400, "invalid_request_error"),
        (404, "session_not_found"),
    ]


def test_it_listens_on_this_machine_alone_by_default(tiny: SimpleNamespace) -> None:
    async def run() -> str:
        async with serving(tiny.backend(), tiny.tokenizer) as gateway:
            return gateway._socket.getsockname()[0]

    assert asyncio.run(run()) == "127.0.0.1"


@pytest.mark.parametrize(
    ("raised", "status", "openai_type", "anthropic_type"),
    [
        (BackendError("busy", status=429, retry_after=3), 429, openai.RateLimitError, anthropic.RateLimitError),
        (BackendError("broken"), 500, openai.InternalServerError, anthropic.InternalServerError),
        (ValueError("top_k=-5"), 400, openai.BadRequestError, anthropic.BadRequestError),
        (KeyError("bug"), 500, openai.InternalServerError, anthropic.InternalServerError),
    ],
)
def test_failures_of_the_model_server_reach_the_client_with_their_status(
    tiny: SimpleNamespace, raised: Exception, status: int, openai_type: Any, anthropic_type: Any
) -> None:
    class Failing:
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise raised

    async def run() -> None:
        async with serving(Failing(), tiny.tokenizer) as gateway:
            session = gateway.open_session()
            endpoint = gateway.endpoint(session)
            async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat:
                for options in ({}, {"stream": True}, {"n": 3}):
                    with pytest.raises(openai_type) as openai_error:
                        await chat.chat.completions.create(model="m", messages=HELLO, **options)
                    assert openai_error.value.status_code == status
                    if isinstance(raised, BackendError) and raised.retry_after:
                        assert openai_error.value.response.headers["retry-after"] == "3"
            async with anthropic.AsyncAnthropic(
                base_url=endpoint.url, api_key=endpoint.token, max_retries=0
            ) as messages:
                with pytest.raises(anthropic_type) as anthropic_error:
                    await messages.messages.create(model="m", messages=HELLO, max_tokens=5)
                assert anthropic_error.value.status_code == status
            assert (await gateway.close_session(session)).calls == ()

    asyncio.run(run())


def test_a_session_has_so_many_calls_and_no_more(tiny: SimpleNamespace) -> None:
    async def run() -> list[int]:
        async with serving(tiny.backend(), tiny.tokenizer, max_calls=2) as gateway:
            endpoint = gateway.endpoint(gateway.open_session())
            async with httpx.AsyncClient(headers={"x-api-key": endpoint.token}) as client:
                body = {"messages": HELLO, "max_tokens": 2}
                return [(await client.post(endpoint.url + CHAT, json=body)).status_code for _ in range(3)]

    assert asyncio.run(run()) == [200, 200, 403]


def test_a_call_that_takes_too_long_is_cancelled(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.session.CALL_TIMEOUT_S", 0.05)

    async def run() -> tuple[int, int]:
        backend = tiny.backend()
        async with serving(backend, tiny.tokenizer, max_turn_tokens=5000) as gateway:
            endpoint = gateway.endpoint(gateway.open_session())
            async with httpx.AsyncClient(headers={"x-api-key": endpoint.token}) as client:
                answer = await client.post(endpoint.url + CHAT, json={"messages": HELLO})
            return answer.status_code, backend.cancelled

    assert asyncio.run(run()) == (504, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_drift": "ignore"}, "on_drift='ignore': expected one of reuse, branch"),
        ({"reasoning": "hidden"}, "reasoning='hidden'"),
        ({"max_calls": 0}, "max_calls=0: expected at least 1"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatewayOptions(**{"max_context_tokens": 10, "max_turn_tokens": 5, **options})


def test_a_tokenizer_whose_end_token_is_ordinary_text_is_refused(tiny: SimpleNamespace) -> None:
    class Other:
        eos_token, eos_token_id, added_tokens_decoder = "</s>", 5, tiny.tokenizer.added_tokens_decoder
        is_fast, backend_tokenizer = True, tiny.tokenizer.backend_tokenizer

    with pytest.raises(ValueError, match="expected its eos_token '</s>' among its special tokens"):
        Renderer(Other(), {})
    Other.is_fast = False
    with pytest.raises(ValueError, match=r"expected one with a tokenizer\.json \(fast\), received Other"):
        Renderer(Other(), {})
