"""Sixty-four sessions at once with random faults: what the model wrote is recorded, and nothing is left behind."""

import asyncio
import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import TinyModel, check_record, serving

from tree_rl.rollout.gateway.backend import BackendError, Generation
from tree_rl.rollout.gateway.gateway import Gateway

SESSIONS = 64
STEPS = 4
FAULTS = ("json", "utf8", "huge", "leave", "429", "500", "bug")
EXPECTED_STATUS = {"json": 400, "utf8": 400, "huge": 413, "429": 429, "500": 500, "bug": 500, "hang": 504}
HUGE = json.dumps({"messages": [{"role": "user", "content": "x" * (10 << 20)}]}).encode()


class FaultyModel(TinyModel):
    """Fails as the last message tells it to."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        last = self.tokenizer.decode(list(prompt_ids)).rsplit("<|im_start|>user", 1)[-1]
        if "fault 429" in last:
            raise BackendError("busy", status=429)
        if "fault 500" in last:
            raise BackendError("broken")
        if "fault bug" in last:
            raise KeyError("bug")
        if "fault leave" in last or "fault hang" in last:
            self.running += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.running -= 1
        return await super().generate(prompt_ids, max_tokens=max_tokens, sampling=sampling, session=session)


class Client:
    """One agent: good turns, and faults between them."""

    def __init__(self, http: httpx.AsyncClient, gateway: Gateway, seed: int) -> None:
        self.http = http
        self.session = gateway.open_session(sampling={"temperature": 1.0})
        self.endpoint = gateway.endpoint(self.session)
        self.random = random.Random(seed)
        self.hangs = seed % 8 == 0
        self.messages: list[dict[str, str]] = [{"role": "user", "content": f"session {seed}"}]
        self.received: list[str] = []
        self.statuses: list[int] = []

    async def play(self) -> None:
        if self.hangs:
            await self.fault("hang")
        for _ in range(STEPS):
            if self.random.random() < 0.5:
                await self.fault(self.random.choice(FAULTS))
            await self.turn(is_stream=self.random.random() < 0.5)

    async def turn(self, *, is_stream: bool) -> None:
        answer = await self.post({"messages": self.messages, "max_tokens": 4, "stream": is_stream})
        assert answer.status_code == 200
        if is_stream:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        else:
            text = answer.json()["choices"][0]["message"]["content"]
        self.received.append(text)
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]

    async def fault(self, kind: str) -> None:
        asked = {"messages": [*self.messages, {"role": "user", "content": f"fault {kind}"}]}
        if kind == "leave":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(self.post(asked), 0.5)
            return
        body = {"json": b'{"messages": [', "utf8": b'{"a": "\xc3\x28"}', "huge": HUGE}.get(kind, asked)
        answer = await self.post(body)
        assert answer.status_code == EXPECTED_STATUS[kind], (kind, answer.text)
        assert answer.json()["error"]["message"]
        self.statuses.append(answer.status_code)

    async def post(self, body: bytes | Mapping[str, Any]) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.endpoint.token}"}
        return await self.http.post(f"{self.endpoint.openai_url}/chat/completions", content=content, headers=headers)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_sixty_four_faulty_sessions_lose_nothing_and_leave_nothing(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.session.CALL_TIMEOUT_S", 5.0)
    monkeypatch.setattr("tree_rl.rollout.gateway.protocols.request_body.MAX_BODY_BYTES", 1 << 20)

    async def run() -> tuple[list[Client], list[Any], FaultyModel]:
        backend = FaultyModel(tiny.model, tiny.tokenizer)
        limits = httpx.Limits(max_connections=None)
        async with serving(backend, tiny.tokenizer, reasoning="inline") as gateway:
            async with httpx.AsyncClient(timeout=60, limits=limits) as http:
                clients = [Client(http, gateway, seed) for seed in range(SESSIONS)]
                await asyncio.gather(*[client.play() for client in clients])
            records = [await gateway.close_session(client.session) for client in clients]
            assert gateway.num_sessions == 0 and backend.running == 0
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return clients, records, backend

    before = open_files()
    clients, records, backend = asyncio.run(run())
    # Threads of earlier tests may look at a file now and then.
    deadline = time.monotonic() + 10
    while open_files() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert open_files() <= before
    left = 0
    for client, record in zip(clients, records, strict=True):
        written = [tiny.tokenizer.decode(call.response_ids).removesuffix("<|im_end|>") for call in record.calls]
        assert written == client.received and len(written) == STEPS
        assert record.refused == Counter(client.statuses)
        left += record.cancelled
        check_record(backend, record)
    assert left > 5
    assert {status for client in clients for status in client.statuses} == set(EXPECTED_STATUS.values())


def test_a_client_that_leaves_takes_its_generation_with_it(tiny: SimpleNamespace) -> None:
    async def run() -> tuple[int, Any]:
        backend = tiny.backend()
        async with serving(backend, tiny.tokenizer, max_turn_tokens=5000) as gateway:
            session = gateway.open_session()
            endpoint = gateway.endpoint(session)
            for is_stream in (False, True):
                _, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
                body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": is_stream}).encode()
                path = endpoint.openai_url.split("/", 3)[3]
                head = f"POST /{path}/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {endpoint.token}\r\n"
                writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
                while not backend.running:
                    await asyncio.sleep(0.001)
                writer.close()
                while backend.running:
                    await asyncio.sleep(0.001)
            return backend.cancelled, await gateway.close_session(session)

    cancelled, record = asyncio.run(asyncio.wait_for(run(), 20))
    assert cancelled == 2 and record.cancelled == 2 and record.calls == ()


def test_closing_a_session_waits_for_what_runs_then_cancels_it(tiny: SimpleNamespace) -> None:
    async def run() -> tuple[list[int], Any, int]:
        backend = FaultyModel(tiny.model, tiny.tokenizer)
        async with serving(backend, tiny.tokenizer) as gateway, httpx.AsyncClient() as http:
            client = Client(http, gateway, 0)
            quick = asyncio.create_task(client.post({"messages": client.messages, "max_tokens": 3}))
            stuck = asyncio.create_task(client.post({"messages": [{"role": "user", "content": "fault hang"}]}))
            while backend.running < 2:
                await asyncio.sleep(0.001)
            record = await gateway.close_session(client.session, grace_s=0.5)
            return [(await task).status_code for task in (quick, stuck)], record, backend.running

    statuses, record, running = asyncio.run(run())
    assert statuses == [200, 403] and running == 0
    assert len(record.calls) == 1 and record.cancelled == 1


def test_a_slow_stream_stays_alive_and_still_tells_its_error(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.server.STREAM_PING_S", 0.05)
    monkeypatch.setattr("tree_rl.rollout.gateway.session.CALL_TIMEOUT_S", 0.3)

    async def run() -> list[str]:
        backend = FaultyModel(tiny.model, tiny.tokenizer)
        async with serving(backend, tiny.tokenizer) as gateway, httpx.AsyncClient() as http:
            client = Client(http, gateway, 0)
            hanging = {"messages": [{"role": "user", "content": "fault hang"}], "stream": True, "max_tokens": 5}
            openai_stream = await client.post(hanging)
            headers = {"x-api-key": client.endpoint.token}
            anthropic_stream = await http.post(f"{client.endpoint.url}/v1/messages", json=hanging, headers=headers)
            record = await gateway.close_session(client.session)
            assert record.refused == {504: 2} and backend.running == 0
            return [openai_stream.text, anthropic_stream.text]

    openai_text, anthropic_text = asyncio.run(run())
    assert openai_text.count(": ping") >= 2 and "longer than 0.3 s" in openai_text
    assert anthropic_text.count("event: ping") >= 2 and "event: error" in anthropic_text
    assert '"type": "timeout_error"' in anthropic_text
