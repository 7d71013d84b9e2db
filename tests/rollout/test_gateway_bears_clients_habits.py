"""What clients do besides: packed bodies, old HTTP, probes, helpers of SDKs. Each is answered, or refused by name."""

import asyncio
import gzip
import json
import zlib
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from gateway_harness import SHELL, talking, trained_text, user
from pydantic import BaseModel

from tree_rl.rollout.transcript import rows_of_calls

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [user("hello")], "max_tokens": 3}).encode()
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "%s"}}\n</tool_call>'


class Person(BaseModel):
    """What the model is asked for."""

    name: str
    age: int


def packed(encoding: str) -> bytes:
    return zlib.compress(BODY) if encoding == "deflate" else gzip.compress(BODY, mtime=0)


async def test_packed_bodies_are_the_plain_ones(tiny: SimpleNamespace) -> None:
    bodies = {"identity": BODY, "gzip": packed("gzip"), "GZIP": packed("gzip"), "deflate": packed("deflate")}
    sent = [*bodies.items(), ("identity", b"\xef\xbb\xbf" + BODY)]
    async with talking(tiny.scripted(*["hi"] * 5)) as talk:
        for encoding, body in sent:
            answer = await talk.http.post(CHAT, content=body, headers={"content-encoding": encoding})
            assert answer.status_code == 200, answer.text
        record = await talk.close()
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
async def test_what_does_not_unpack_is_refused_by_name(
    tiny: SimpleNamespace, encoding: str, body: bytes, status: int, message: str
) -> None:
    async with talking(tiny.scripted()) as talk:
        answer = await talk.http.post(CHAT, content=body, headers={"content-encoding": encoding})
        assert answer.status_code == status and message in answer.json()["error"]["message"]
        assert (await talk.close()).calls == ()


async def test_probes_learn_what_is_served(tiny: SimpleNamespace) -> None:
    async with talking(tiny.scripted()) as talk:
        head = await talk.http.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        for method, path, allowed in (("OPTIONS", "/v1/models", "GET"), ("GET", CHAT, "POST")):
            answer = await talk.http.request(method, path)
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
                answer = await talk.http.request(method, path)
                message = answer.json()["error"]["message"]
                assert answer.status_code == 404
                assert note in message and "expected /v1/chat/completions" in message
        assert (await talk.close()).calls == ()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_old_http_and_bodies_in_pieces_are_answered(tiny: SimpleNamespace, version: str, streamed: bool) -> None:
    body = json.dumps({"messages": [user("hello")], "stream": streamed}).encode()
    async with talking(tiny.scripted("hi there")) as talk:
        address = urlsplit(talk.endpoint.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST {address.path}{CHAT} HTTP/{version}\r\nAuthorization: bearer {talk.endpoint.token}\r\n"
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
        assert len((await talk.close()).calls) == 1
    assert answer.startswith(b"HTTP/1.1 200") and b"hi there" in answer
    assert (b"data: [DONE]" in answer) == streamed


async def test_the_sdks_parse_what_the_model_writes(tiny: SimpleNamespace) -> None:
    written = '{"name": "Ann", "age": 3}'
    called = f'<tool_call>\n{{"name": "Person", "arguments": {written}}}\n</tool_call>'
    options: dict[str, Any] = {"model": "m", "messages": [user("hello")]}
    async with talking(tiny.scripted(*[written] * 4, called), json_output="instruct") as talk:
        completions, responses = talk.openai.chat.completions, talk.openai.responses
        whole = await completions.parse(**options, response_format=Person)
        usage = {"include_usage": True}
        async with completions.stream(**options, response_format=Person, stream_options=usage) as events:
            streamed = await events.get_final_completion()
        response = await responses.parse(model="m", input="hello", text_format=Person)
        async with responses.stream(model="m", input="hello", text_format=Person) as events:
            streamed_response = await events.get_final_response()
        use = await completions.parse(**options, tools=[openai.pydantic_function_tool(Person)])
        record = await talk.close()
    parsed = [one.choices[0].message.parsed for one in (whole, streamed)]
    parsed += [response.output_parsed, streamed_response.output_parsed]
    parsed += [use.choices[0].message.tool_calls[0].function.parsed_arguments]
    assert parsed == [Person(name="Ann", age=3)] * 5 and len(record.calls) == 5
    assert streamed.usage.total_tokens == streamed.usage.prompt_tokens + streamed.usage.completion_tokens


async def test_anthropics_tool_runner_goes_on_without_a_thread(tiny: SimpleNamespace) -> None:
    @anthropic.beta_async_tool
    async def shell(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    async with talking(tiny.scripted(CALL % "ls", "done")) as talk:
        runner = talk.anthropic.beta.messages.tool_runner(
            model="m", max_tokens=90, tools=[shell], messages=[user("hello")]
        )
        answer = await runner.until_done()
        record = await talk.close()
    assert [block.text for block in answer.content] == ["done"]
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row) == f"{CALL % 'ls'}<|im_end|>done<|im_end|>"
    assert dict(record.refused) == {400: 1}


async def test_results_of_parallel_calls_come_in_any_order_with_pictures(tiny: SimpleNamespace) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    film = {"type": "video_url", "video_url": {"url": "https://a.b/c.mp4"}}
    async with talking(tiny.scripted(f"{CALL % 'ls'}\n{CALL % 'pwd'}", "done")) as talk:
        message = (await talk.ask("hello", tools=[SHELL], max_completion_tokens=300)).choices[0].message
        content = [{"type": "text", "text": "a.py"}, picture, film]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": content} for call in reversed(message.tool_calls)
        ]
        await talk.ask([user("hello"), message.model_dump(exclude_none=True), *results], tools=[SHELL])
        record = await talk.close()
    (row,) = rows_of_calls(record.calls)
    assert trained_text(tiny.tokenizer, row).endswith("done<|im_end|>")
    assert dict(record.left_out) == {"image": 1, "video": 1}
