"""What clients do besides: packed bodies, old HTTP, probes, helpers of SDKs. Each is answered, or refused by name."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
from gateway_harness import SHELL, TinyModel, check_record, run_session, serving, trained_text
from pydantic import BaseModel

from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

HELLO = [{"role": "user", "content": "hello"}]
BODY = json.dumps({"messages": HELLO, "max_tokens": 3}).encode()
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "%s"}}\n</tool_call>'


class Person(BaseModel):
    """What the model is asked for."""

    name: str
    age: int


def scripted(tiny: SimpleNamespace, *turns: str) -> TinyModel:
    """A model that writes these turns, whatever it is asked."""
    left = iter(turns)
    return TinyModel(tiny.model, tiny.tokenizer, lambda prompt: next(left))


def raw_session(backend: TinyModel, play: Callable[[httpx.AsyncClient, Any], Awaitable[None]]) -> RecordedSession:
    """A session over plain HTTP."""

    async def run() -> RecordedSession:
        async with serving(backend, backend.tokenizer) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            key = {"authorization": f"Bearer {endpoint.token}"}
            async with httpx.AsyncClient(base_url=endpoint.url, headers=key, timeout=None) as client:
                await play(client, endpoint)
            return await gateway.close_session(session)

    record = asyncio.run(run())
    check_record(backend, record)
    return record


def packed(encoding: str) -> bytes:
    return zlib.compress(BODY) if encoding == "deflate" else gzip.compress(BODY, mtime=0)


def test_packed_bodies_are_the_plain_ones(tiny: SimpleNamespace) -> None:
    async def play(client: httpx.AsyncClient, endpoint: Any) -> None:
        bodies = {"identity": BODY, "gzip": packed("gzip"), "GZIP": packed("gzip"), "deflate": packed("deflate")}
        for encoding, body in bodies.items():
            answer = await client.post("/v1/chat/completions", content=body, headers={"content-encoding": encoding})
            assert answer.status_code == 200, answer.text
        marked = await client.post("/v1/chat/completions", content=b"\xef\xbb\xbf" + BODY)
        assert marked.status_code == 200, marked.text

    record = raw_session(scripted(tiny, *["hi"] * 5), play)
    assert len(record.calls) == 5 and len({call.prompt_ids for call in record.calls}) == 1


@pytest.mark.parametrize(
    ("encoding", "body", "status", "message"),
    [
        ("br", BODY, 415, "content-encoding: expected gzip, x-gzip, deflate or none, received 'br'"),
        ("zstd", BODY, 415, "received 'zstd'"),
        ("gzip", BODY, 400, "expected data of gzip, received others"),
        ("gzip", packed("gzip")[:-3], 400, "expected one whole stream of gzip"),
        ("gzip", packed("gzip") * 2, 400, "expected one whole stream of gzip"),
        ("gzip", gzip.compress(b" " * (64 << 20), mtime=0), 413, "expected a body of at most"),
    ],
)
def test_what_does_not_unpack_is_refused_by_name(
    tiny: SimpleNamespace, encoding: str, body: bytes, status: int, message: str
) -> None:
    async def play(client: httpx.AsyncClient, endpoint: Any) -> None:
        answer = await client.post("/v1/chat/completions", content=body, headers={"content-encoding": encoding})
        assert answer.status_code == status and message in answer.json()["error"]["message"]

    assert raw_session(scripted(tiny), play).calls == ()


def test_probes_learn_what_is_served(tiny: SimpleNamespace) -> None:
    async def play(client: httpx.AsyncClient, endpoint: Any) -> None:
        head = await client.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        for method, path, allowed in (("OPTIONS", "/v1/models", "GET"), ("GET", "/v1/chat/completions", "POST")):
            answer = await client.request(method, path)
            assert answer.status_code == 405 and allowed in answer.headers["allow"]
        for path, note in {
            "/api/tags": "Ollama",
            "/v1/completions": "send messages",
            "/v1/embeddings": "embeds nothing",
            "/v1/conversations": "previous_response_id",
            "/v1/messages/batches": "one request at a time",
            "/v1/v1/chat/completions": "the client was given an address",
            "/health": "/v1/responses",
        }.items():
            for method in ("GET", "POST"):
                answer = await client.request(method, path)
                assert answer.status_code == 404
                message = answer.json()["error"]["message"]
                assert note in message and "expected /v1/chat/completions" in message

    assert raw_session(scripted(tiny), play).calls == ()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_old_http_and_bodies_in_pieces_are_answered(tiny: SimpleNamespace, version: str, streamed: bool) -> None:
    body = json.dumps({"messages": HELLO, "stream": streamed}).encode()

    async def play(client: httpx.AsyncClient, endpoint: Any) -> None:
        address = urlsplit(endpoint.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST {address.path}/v1/chat/completions HTTP/{version}\r\nAuthorization: bearer {endpoint.token}\r\n"
        if version == "1.0":
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        else:
            writer.write(f"{head}Host: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for start in range(0, len(body), 7):
                piece = body[start : start + 7]
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            writer.write(b"0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200") and b"hi there" in answer
        assert (b"data: [DONE]" in answer) == streamed

    assert len(raw_session(scripted(tiny, "hi there"), play).calls) == 1


def test_the_sdks_parse_what_the_model_writes(tiny: SimpleNamespace) -> None:
    written = '{"name": "Ann", "age": 3}'
    tool = openai.pydantic_function_tool(Person)
    called = '<tool_call>\n{"name": "Person", "arguments": {"name": "Ann", "age": 3}}\n</tool_call>'

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        options: dict[str, Any] = {"model": "m", "messages": HELLO}
        whole = await chat.chat.completions.parse(**options, response_format=Person)
        async with chat.chat.completions.stream(
            **options, response_format=Person, stream_options={"include_usage": True}
        ) as events:
            streamed = await events.get_final_completion()
        response = await chat.responses.parse(model="m", input="hello", text_format=Person)
        async with chat.responses.stream(model="m", input="hello", text_format=Person) as events:
            streamed_response = await events.get_final_response()
        use = await chat.chat.completions.parse(**options, tools=[tool])
        arguments = use.choices[0].message.tool_calls[0].function.parsed_arguments
        parsed = [one.choices[0].message.parsed for one in (whole, streamed)]
        parsed += [response.output_parsed, streamed_response.output_parsed, arguments]
        assert parsed == [Person(name="Ann", age=3)] * 5
        assert streamed.usage.total_tokens == streamed.usage.prompt_tokens + streamed.usage.completion_tokens

    record = run_session(scripted(tiny, *[written] * 4, called), play, json_output="instruct")
    assert len(record.calls) == 5


def test_anthropics_tool_runner_goes_on_without_a_thread(tiny: SimpleNamespace) -> None:
    @anthropic.beta_async_tool
    async def shell(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    backend = scripted(tiny, CALL % "ls", "done")

    async def run() -> RecordedSession:
        async with serving(backend, backend.tokenizer) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as client:
                runner = client.beta.messages.tool_runner(model="m", max_tokens=90, tools=[shell], messages=HELLO)
                answer = await runner.until_done()
                assert [block.text for block in answer.content] == ["done"]
            return await gateway.close_session(session)

    record = asyncio.run(run())
    check_record(backend, record)
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row) == f"{CALL % 'ls'}<|im_end|>done<|im_end|>"
    assert dict(record.refused) == {400: 1}


def test_results_of_parallel_calls_come_in_any_order_with_pictures(tiny: SimpleNamespace) -> None:
    backend = scripted(tiny, f"{CALL % 'ls'}\n{CALL % 'pwd'}", "done")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    film = {"type": "video_url", "video_url": {"url": "https://a.b/c.mp4"}}

    async def play(chat: openai.AsyncOpenAI, endpoint: Any) -> None:
        answer = await chat.chat.completions.create(model="m", messages=HELLO, tools=[SHELL], max_completion_tokens=300)
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "a.py"}, picture, film]}
            for call in reversed(message.tool_calls)
        ]
        talk = [*HELLO, message.model_dump(exclude_none=True), *results]
        await chat.chat.completions.create(model="m", messages=talk, tools=[SHELL])

    record = run_session(backend, play)
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row).endswith("done<|im_end|>")
    assert dict(record.left_out) == {"image": 1, "video": 1}
