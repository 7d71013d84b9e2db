"""Calls that fail, hang or lose their client: what else was written is recorded, and nothing is left behind."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from gateway_harness import TinyModel, talking, user

from tree_rl.rollout.gateway.backend import Generation

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
MODEL = "/v1beta/models/gemini-2.5-pro:streamGenerateContent"
TOLD = {"messages": [user("go")], "max_tokens": 5, "stream": True}


class HangingModel(TinyModel):
    """Never answers a question that says so."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        if "hang" in self.tokenizer.decode(list(prompt_ids)):
            self.running += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.running -= 1
        return await super().generate(prompt_ids, max_tokens=max_tokens, sampling=sampling, session=session)


async def test_a_client_that_leaves_takes_its_generation_with_it(tiny: SimpleNamespace) -> None:
    backend = tiny.backend()
    async with asyncio.timeout(20), talking(backend, max_turn_tokens=5000) as talk:
        address = urlsplit(talk.endpoint.openai_url)
        for is_stream in (False, True):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            body = json.dumps({"messages": [user("a")], "stream": is_stream}).encode()
            head = f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {talk.endpoint.token}\r\n"
            writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
            while not backend.running:
                await asyncio.sleep(0.001)
            writer.close()
            while backend.running:
                await asyncio.sleep(0.001)
        record = await talk.close()
    assert backend.cancelled == 2 and record.cancelled == 2 and record.calls == ()


async def test_closing_a_session_waits_for_what_runs_then_cancels_it(tiny: SimpleNamespace) -> None:
    backend = HangingModel(tiny.model, tiny.tokenizer)
    async with talking(backend) as talk:
        asked = [{"messages": [user(text)], "max_tokens": 3} for text in ("quick", "hang")]
        calls = [asyncio.create_task(talk.http.post(CHAT, json=body)) for body in asked]
        while backend.running < 2:
            await asyncio.sleep(0.001)
        record = await talk.gateway.close_session(talk.session, grace_s=3.0)
        assert [(await call).status_code for call in calls] == [200, 403] and backend.running == 0
    assert len(record.calls) == 1 and record.cancelled == 1


async def test_a_slow_stream_stays_alive_and_still_tells_its_error(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.server.STREAM_PING_S", 0.05)
    monkeypatch.setattr("tree_rl.rollout.gateway.session.CALL_TIMEOUT_S", 1.0)
    backend = HangingModel(tiny.model, tiny.tokenizer)
    async with talking(backend) as talk:
        hanging = {**TOLD, "messages": [user("hang")]}
        openai_text, anthropic_text = [(await talk.http.post(path, json=hanging)).text for path in (CHAT, MESSAGES)]
        record = await talk.close()
    assert record.refused == {504: 2} and backend.running == 0
    assert openai_text.count(": ping") >= 2 and "longer than 1 s" in openai_text
    assert anthropic_text.count("event: ping") >= 2 and "event: error" in anthropic_text
    assert '"type": "timeout_error"' in anthropic_text


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        (CHAT, TOLD, {"error": {"type": "invalid_request_error"}}),
        (MESSAGES, TOLD, {"type": "error", "error": {"type": "invalid_request_error"}}),
        ("/v1/responses", {"input": "go", "stream": True}, {"type": "error", "code": "refused_by_model"}),
        (f"{MODEL}?alt=sse", {"contents": [{"parts": [{"text": "q"}]}]}, {"error": {"status": "INVALID_ARGUMENT"}}),
        (MODEL, {"contents": [{"parts": [{"text": "q"}]}]}, {"error": {"status": "INVALID_ARGUMENT"}}),
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


async def test_an_error_of_a_response_in_the_background_is_kept(tiny: SimpleNamespace) -> None:
    backend = tiny.backend()

    async def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no such token")

    backend.generate = fails
    async with talking(backend) as talk:
        failed = await talk.openai.responses.create(model="m", input="go", background=True)
        while failed.status == "in_progress":
            await asyncio.sleep(0.01)
            failed = await talk.openai.responses.retrieve(failed.id)
    assert (failed.status, failed.error.code) == ("failed", "invalid_prompt")
