"""Hostile requests: an error in words for the agent, and no session is lost."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from gateway_harness import talking, user

from tree_rl.rollout.gateway.endpoint import Endpoint

DEEP = "[" * 10_000 + "]" * 10_000
DIGITS = "9" * 5_000


def message(content: str, more: str = "") -> str:
    return f'{{"messages": [{{"role": "user", "content": {content}}}], "max_tokens": 2{more}}}'


def with_field(field: str) -> str:
    return message('"a"', f", {field}")


def with_call(arguments: str) -> str:
    call = f'{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
    return f'{{"messages": [{{"role": "assistant", "content": "", "tool_calls": [{call}]}}], "max_tokens": 2}}'


REFUSED = {
    "surrogate in model": with_field(r'"model": "\ud800"'),
    "surrogate in a key": with_field(r'"\ud800": 1'),
    "surrogate in arguments": with_call(r'{"a": "\ud800"}'),
    "halves in the wrong order": message(r'"\udc00\ud800"'),
    "long integer in arguments": with_call(f'{{"a": {DIGITS}}}'),
    "deep content": message(DEEP),
    "deep objects": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "infinite number": with_field('"temperature": 1e999'),
    "minus infinity": with_field('"top_p": -Infinity'),
    "many stop texts": with_field('"stop": [' + ", ".join(['"a"'] * 1000) + "]"),
    "top_k beyond any integer": with_field(f'"top_k": {"9" * 4000}'),
}
ANSWERED = {
    "NUL in content": message('"\\u0000"'),
    "NUL in model": with_field('"model": "\\u0000"'),
    "whole character of two halves": message(r'"\ud83d\ude00"'),
    "long integer in arguments that are text": with_call(json.dumps(f'{{"a": {DIGITS}}}')),
    "deep arguments that are text": with_call(json.dumps(f'{{"a": {"[" * 1000}{"]" * 1000}}}')),
    "surrogate in arguments that are text": with_call(json.dumps(r'{"a": "\ud800"}')),
    "model of 100,000 characters": with_field(f'"model": "{"m" * 100_000}"'),
}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")


async def test_a_request_that_nobody_could_answer_is_refused_and_the_session_goes_on(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend()) as talk:
        for kind, body in REFUSED.items():
            for path in PATHS:
                answer = await talk.http.post(path, content=body)
                # Anthropic's protocol has no tool calls of this form and ignores `seed`, `stop` and unknown keys.
                assert answer.status_code == 400 or (path != PATHS[0] and answer.status_code == 200), (kind, path)
                assert answer.text.encode()
        refused = (await talk.http.post(PATHS[0], content=REFUSED["surrogate in model"])).json()["error"]
        assert refused["param"] == "model" and "lone surrogates" in refused["message"]
        for kind, body in ANSWERED.items():
            assert (await talk.http.post(PATHS[0], content=body)).status_code == 200, kind
    assert set(talk.record.refused) == {400} and len(talk.record.calls) >= len(ANSWERED)


HEAD = "POST {path}/v1/chat/completions HTTP/1.1\r\nhost: h\r\nx-api-key: {key}\r\n"
BODY = json.dumps({"messages": [user("hello")], "max_tokens": 2})
RAW: dict[str, str | bytes] = {
    "negative length": HEAD + "content-length: -1\r\n\r\n" + BODY,
    "no number": HEAD + "content-length: ten\r\n\r\n" + BODY,
    "two lengths": HEAD + "content-length: 5\r\ncontent-length: 6\r\n\r\n" + BODY,
    "length and chunks": HEAD + "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "length of 30 digits": HEAD + f"content-length: {'9' * 30}\r\n\r\n" + BODY,
    "length of 5,000 digits": HEAD + f"content-length: {DIGITS}\r\n\r\n" + BODY,
    "too short a length": HEAD + "content-length: 5\r\n\r\n" + BODY,
    "chunks of nonsense": HEAD + "transfer-encoding: chunked\r\n\r\nZZZ\r\n" + BODY,
    "endless chunk size": HEAD + "transfer-encoding: chunked\r\n\r\n" + "f" * 40 + "\r\n",
    "unknown coding": HEAD + "transfer-encoding: gzip\r\n\r\n" + BODY,
    "NUL in a header": HEAD + "x-a: \0\r\ncontent-length: 2\r\n\r\n{}",
    "host with an open bracket": "POST {path}/v1/nothing HTTP/1.1\r\nhost: [\r\nx-api-key: {key}\r\n\r\n",
    "no host": "POST {path}/v1/nothing HTTP/1.1\r\n\r\n",
    "path that is no ASCII": b"GET /\xff\xfe HTTP/1.1\r\nhost: h\r\n\r\n",
    "path of no UTF-8": "GET {path}/%ff%ed%a0%80/v1/models HTTP/1.1\r\nhost: h\r\n\r\n",
    "path of a megabyte": "GET /" + "a" * 1_000_000 + " HTTP/1.1\r\nhost: h\r\n\r\n",
    "slash at the end": "POST {path}/v1/chat/completions/ HTTP/1.1\r\nhost: [\r\ncontent-length: 0\r\n\r\n",
    "agent's name": HEAD + "x-agent-name: \xff/..\r\ncontent-length: 2\r\n\r\n{{}}",
    "upgrade": "GET {path}/v1/models HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "other version": "GET / HTTP/9.9\r\n\r\n",
    "nothing": b"\r\n\r\n\r\n",
    "half a request line": "POST {path}/v1/ch",
    "half a head": HEAD,
    "half a body": HEAD + "content-length: 5000\r\n\r\n" + BODY,
    "half a body, with a wrong key": HEAD.replace("{key}", "k") + "content-length: 5000\r\n\r\n" + BODY,
    "half a chunk": HEAD + "transfer-encoding: chunked\r\n\r\nff\r\n{{",
}


async def send(endpoint: Endpoint, kind: str, *, drips: bool = False) -> bytes:
    """Send raw bytes, and if it drips a byte again and again; read until the gateway closes the connection."""

    async def drip() -> None:
        while drips:
            await asyncio.sleep(0.1)
            writer.write(b"a")

    raw = RAW[kind]
    address, _, path = endpoint.url.removeprefix("http://").partition("/")
    if isinstance(raw, str):
        raw = raw.replace("{path}", f"/{path}").replace("{key}", endpoint.token).replace("{{", "{").encode("latin-1")
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    try:
        writer.write(raw)
        dripping = asyncio.create_task(drip())
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        dripping.cancel()
        writer.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of patience become tenths."""
    monkeypatch.setattr("tree_rl.rollout.gateway.connections.HEAD_TIMEOUT_S", 0.4)
    monkeypatch.setattr("tree_rl.rollout.gateway.protocols.request_body.BODY_TIMEOUT_S", 0.4)
    monkeypatch.setattr("tree_rl.rollout.gateway.gateway.KEEP_ALIVE_S", 1)


@pytest.mark.usefixtures("impatient")
async def test_bytes_that_are_no_request_are_refused_and_every_connection_is_closed(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend()) as talk:
        answers = await asyncio.gather(*[asyncio.wait_for(send(talk.endpoint, kind), 30) for kind in RAW])
        for kind, answer in zip(RAW, answers, strict=True):
            status = answer[9:10]
            assert not answer or status in (b"3", b"4") or (kind == "upgrade" and status == b"2"), (kind, answer)
        by_kind = dict(zip(RAW, answers, strict=True))
        assert b" 408 " in by_kind["half a body"] and by_kind["half a request line"] == b""
        assert (await talk.http.post(PATHS[0], content=BODY)).status_code == 200
    assert len(talk.record.calls) == 1 and not any(status >= 500 for status in talk.record.refused)


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_sends_byte_after_byte_gets_no_more_time(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend()) as talk:
        kinds = [kind for kind in RAW if kind.startswith("half")]
        await asyncio.gather(*[asyncio.wait_for(send(talk.endpoint, kind, drips=True), 30) for kind in kinds])
