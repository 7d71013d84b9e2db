"""Calls that fail, hang or lose their client: what else was written is recorded, and nothing is left behind.

What a gateway does not answer, it refuses with a status, in the protocol's own form.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
from gateway_harness import TinyModel, talking, user

from tree_rl.rollout.gateway.backend import BackendError, Generation
from tree_rl.rollout.gateway.tokens.rendering import Renderer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
MODEL = "/v1beta/models/gemini-2.5-pro:streamGenerateContent"
TOLD = {"messages": [user("go")], "max_tokens": 5, "stream": True}


class HangingModel(TinyModel):
    """Never answers a question that says so."""

    async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Generation:
        if "hang" in self.tokenizer.decode(list(prompt_ids)):
            self.running += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.running -= 1
        return await super().generate(prompt_ids, **asked)


async def test_a_client_that_leaves_takes_its_generation_with_it(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = tiny.backend()
    async with asyncio.timeout(20), talking(backend, max_turn_tokens=5000) as talk:
        address = urlsplit(talk.endpoint.openai_url)
        for is_stream, has_pings in ((False, False), (True, False), (True, True)):
            monkeypatch.setattr("tree_rl.rollout.gateway.server.STREAM_PING_S", 0.01 if has_pings else 10.0)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            body = json.dumps({"messages": [user("a")], "stream": is_stream}).encode()
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {talk.endpoint.token}\r\n"
            writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
            while not backend.running:
                await asyncio.sleep(0.001)
            if has_pings:
                await reader.readuntil(b": ping")
            writer.close()
            while backend.running:
                await asyncio.sleep(0.001)
    assert backend.cancelled == 3 and talk.record.cancelled == 3 and talk.record.calls == ()


async def test_answers_whose_client_leaves_while_they_are_read_are_dropped_together(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_read = asyncio.Event()

    async def read_for_ever(*_: Any, **__: Any) -> None:
        is_read.set()
        await asyncio.sleep(3600)

    async with asyncio.timeout(20), talking(tiny.backend()) as talk:
        monkeypatch.setattr("tree_rl.rollout.gateway.session.off_the_loop", read_for_ever)
        two = {"messages": [user("a")], "max_tokens": 3, "n": 2, "logprobs": True}
        call = asyncio.create_task(talk.http.post(CHAT, json=two))
        await is_read.wait()
        call.cancel()
        await asyncio.wait([call])
    assert talk.record.calls == () and talk.record.cancelled == 1


async def test_closing_a_session_cancels_what_runs_and_keeps_what_ended(tiny: SimpleNamespace) -> None:
    backend = HangingModel(tiny.model, tiny.tokenizer)
    async with talking(backend) as talk:
        quick, hanging = ({"messages": [user(text)], "max_tokens": 3} for text in ("quick", "hang"))
        assert (await talk.http.post(CHAT, json=quick)).status_code == 200
        call = asyncio.create_task(talk.http.post(CHAT, json=hanging))
        while not backend.running:
            await asyncio.sleep(0.001)
        record = await talk.gateway.close_session(talk.session)
        assert (await call).status_code == 403 and backend.running == 0
    assert len(record.calls) == 1 and record.cancelled == 1


async def test_a_call_that_takes_too_long_is_cancelled_and_its_stream_stays_alive_until_then(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.server.STREAM_PING_S", 0.05)
    monkeypatch.setattr("tree_rl.rollout.gateway.session.CALL_TIMEOUT_S", 1.0)
    backend = HangingModel(tiny.model, tiny.tokenizer)
    async with talking(backend) as talk:
        hanging = {**TOLD, "messages": [user("hang")]}
        openai_text, anthropic_text = [(await talk.http.post(path, json=hanging)).text for path in (CHAT, MESSAGES)]
        assert (await talk.http.post(CHAT, json={**hanging, "stream": False})).status_code == 504
    assert talk.record.refused == {504: 3} and backend.running == 0
    assert openai_text.count(": ping") >= 2 and "longer than 1 s" in openai_text
    assert anthropic_text.count("event: ping") >= 2 and "event: error" in anthropic_text
    assert '"type": "timeout_error"' in anthropic_text


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        (CHAT, TOLD, {"error": {"type": "invalid_request_error"}}),
        (MESSAGES, TOLD, {"type": "error", "error": {"type": "invalid_request_error"}}),
        ("/v1/responses", {"input": "go", "stream": True}, {"type": "error", "code": "refused_by_model"}),
        *(
            (MODEL + query, {"contents": [{"parts": [{"text": "q"}]}]}, {"error": {"status": "INVALID_ARGUMENT"}})
            for query in ("?alt=sse", "")
        ),
    ],
)
async def test_an_error_within_a_stream_keeps_the_protocols_form(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], form: dict[str, Any]
) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.server.STREAM_PING_S", 0.02)
    backend = tiny.backend()

    async def fails(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0.5)
        raise ValueError("no such token")

    backend.generate = fails
    async with talking(backend) as talk:
        answer = await talk.http.post(path, json=body)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    told = [one for one in map(json.loads, lines) if "no such token" in str(one)] if lines else answer.json()
    assert answer.status_code == 200 and "no such token" in str(told)
    error = form.pop("error", {})
    assert any(form.items() <= one.items() and error.items() <= one.get("error", {}).items() for one in told), told


BODY = {"messages": [user("hello")], "max_tokens": 2}


async def test_without_the_sessions_own_token_nobody_is_answered(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend()) as talk, httpx.AsyncClient() as client:
        assert talk.gateway._socket.getsockname()[0] == "127.0.0.1", "it listens on this machine alone"
        mine, other = talk.session, talk.gateway.open_session()
        root = talk.endpoint.url.split("/s/")[0]
        chat, key = talk.endpoint.url + CHAT, {"x-api-key": mine.token}
        for url, headers, expected in (
            (chat, {}, (401, "authentication_error")),
            (chat, {"authorization": "Bearer wrong"}, (401, "authentication_error")),
            (chat, {"authorization": f"Bearer {other.token}"}, (401, "authentication_error")),
            (talk.endpoint.url + MESSAGES, {"x-api-key": mine.token[:-1]}, (401, "authentication_error")),
            (root + CHAT, {"authorization": "Bearer wrong"}, (401, "authentication_error")),
            (f"{root}/s/nowhere{CHAT}", key, (404, "not_found_error")),
            (f"{talk.endpoint.url}/v1/embeddings", key, (404, "not_found_error")),
            (chat, {"authorization": f"bearer {mine.token}"}, (200, None)),
            (chat, {**key, "x-agent-name": "a b"}, (400, "invalid_request_error")),
        ):
            answer = await client.post(url, json=BODY, headers=headers)
            assert (answer.status_code, answer.json().get("error", {}).get("type")) == expected, (url, headers)
        await talk.close()
        late = await client.post(chat, json=BODY, headers=key)
    assert (late.status_code, late.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("raised", "status", "kind", "code"),
    [
        (BackendError("busy", status=429, retry_after=3), 429, "RateLimitError", "rate_limit_exceeded"),
        (BackendError("broken"), 500, "InternalServerError", "server_error"),
        (ValueError("top_k=-5"), 400, "BadRequestError", "invalid_prompt"),
        (KeyError("bug"), 500, "InternalServerError", "server_error"),
    ],
)
async def test_failures_of_the_model_server_reach_the_client_with_their_status(
    tiny: SimpleNamespace, raised: Exception, status: int, kind: str, code: str
) -> None:
    def fail(prompt: str) -> str:
        raise raised

    async with talking(TinyModel(tiny.model, tiny.tokenizer, fail)) as talk:
        for options in ({}, {"stream": True}, {"n": 3}):
            with pytest.raises(getattr(openai, kind)) as openai_error:
                await talk.ask("hello", **options)
            assert openai_error.value.status_code == status
            if isinstance(raised, BackendError) and raised.retry_after:
                assert openai_error.value.response.headers["retry-after"] == "3"
        with pytest.raises(getattr(anthropic, kind)) as anthropic_error:
            await talk.anthropic.messages.create(model="m", messages=[user("hello")], max_tokens=5)
        assert anthropic_error.value.status_code == status
        failed = await talk.openai.responses.create(model="m", input="go", background=True)
        while failed.status == "in_progress":
            await asyncio.sleep(0.01)
            failed = await talk.openai.responses.retrieve(failed.id)
        assert (failed.status, failed.error.code) == ("failed", code)
    assert talk.record.calls == ()


class AbortingModel(TinyModel):
    """Its server stops in the middle of the first answer, which ends last."""

    async def generate(self, prompt_ids: Sequence[int], **asked: Any) -> Generation:
        is_first = not self.prompts
        made = await super().generate(prompt_ids, **asked)
        while is_first and self.running:
            await asyncio.sleep(0)
        return replace(made, finish_reason="abort") if is_first else made


@pytest.mark.parametrize("count", [1, 3])
async def test_an_aborted_answer_is_refused_and_not_recorded(tiny: SimpleNamespace, count: int) -> None:
    body = {**BODY, "n": count}
    async with talking(AbortingModel(tiny.model, tiny.tokenizer), max_calls=count) as talk:
        assert [(await talk.http.post(CHAT, json=body)).status_code for _ in range(2)] == [503, 200]
    assert [call.finish_reason == "abort" for call in talk.record.calls] == [False] * count


async def test_a_session_has_so_many_calls_and_those_that_are_not_made_do_not_count(tiny: SimpleNamespace) -> None:
    long = {**BODY, "messages": [user("long " * 300)]}
    async with talking(AbortingModel(tiny.model, tiny.tokenizer), max_calls=2, max_context_tokens=200) as talk:
        asked = [long, long, BODY, BODY, BODY, BODY]
        statuses = [(await talk.http.post(CHAT, json=body)).status_code for body in asked]
    assert statuses == [400, 400, 503, 200, 200, 403]


def test_a_tokenizer_whose_end_token_is_ordinary_text_is_refused(tiny: SimpleNamespace) -> None:
    class Other:
        eos_token, eos_token_id, added_tokens_decoder = "</s>", 5, tiny.tokenizer.added_tokens_decoder
        is_fast, backend_tokenizer = True, tiny.tokenizer.backend_tokenizer

    with pytest.raises(ValueError, match="expected its eos_token '</s>' among its special tokens"):
        Renderer(Other(), {})
    Other.is_fast = False
    with pytest.raises(ValueError, match=r"expected one with a tokenizer\.json \(fast\), received Other"):
        Renderer(Other(), {})
