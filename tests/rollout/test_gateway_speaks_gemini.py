"""Gemini's clients: raw requests as Google documents them, and Google's SDK where it is installed."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import rows, serving, trained_text
from ledger import Ledger
from protocol_turns import LS, THOUGHT, TURNS, by_turn

from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.protocols.fields import RequestError
from tree_rl.rollout.gateway.protocols.gemini import error_body, read_request

SCHEMA = {
    "type": "OBJECT",
    "properties": {"command": {"type": "STRING", "nullable": True}},
    "propertyOrdering": ["command"],
}
SHELL = {"name": "shell", "description": "Run.", "parameters": SCHEMA}
MODEL = "/v1beta/models/gemini-2.5-pro"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


def talk(tiny: SimpleNamespace, turns: Sequence[str], play: Any, **options: Any) -> SimpleNamespace:
    """Let `play(client, endpoint)` act in one session. Every token must be recorded as it was given."""
    backend = Ledger(tiny.tokenizer, by_turn(turns))

    async def run() -> Any:
        async with serving(backend, tiny.tokenizer, **options) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            headers = {"x-goog-api-key": endpoint.token}
            async with httpx.AsyncClient(base_url=endpoint.url, headers=headers, timeout=30) as client:
                result = await play(client, endpoint)
            return result, await gateway.close_session(session)

    result, record = asyncio.run(run())
    assert backend.differences(record) == 0
    return SimpleNamespace(result=result, record=record)


async def ask(client: httpx.AsyncClient, how: str, contents: list[Any], **more: Any) -> list[dict[str, Any]]:
    """The chunks of an answer: one of a whole answer."""
    call = "generateContent" if how == "whole" else "streamGenerateContent"
    body = {"contents": contents, "tools": [{"functionDeclarations": [SHELL]}], **more}
    answer = await client.post(f"{MODEL}:{call}", json=body, params={"alt": "sse"} if how == "events" else {})
    assert answer.status_code == 200, answer.text
    if how == "events":
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert answer.headers["content-type"] == "application/json"
    return [answer.json()] if how == "whole" else answer.json()


@pytest.mark.parametrize("how", ["whole", "events", "list"])
def test_an_answer_has_thoughts_text_calls_and_usage(tiny: SimpleNamespace, how: str) -> None:
    async def play(client: httpx.AsyncClient, _: Endpoint) -> Any:
        config = {"thinkingConfig": {"includeThoughts": True}}
        chunks = await ask(client, how, [user("hello")], generationConfig=config)
        counted = await client.post(
            f"{MODEL}:countTokens",
            json={
                "generateContentRequest": {"contents": [user("hello")], "tools": [{"function_declarations": [SHELL]}]}
            },
        )
        return chunks, counted.json()

    asked = talk(tiny, (THOUGHT + "I look.\n" + LS + LS,), play)
    chunks, counted = asked.result
    thought, text, *calls = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert (thought["text"], thought["thought"]) == ("look around ", True)
    assert text["text"] == "I look." and "thoughtSignature" in text
    assert [(call["functionCall"]["name"], call["functionCall"]["args"]) for call in calls] == [
        ("shell", {"command": "ls -l"})
    ] * 2
    (call,) = asked.record.calls
    usage = chunks[-1]["usageMetadata"]
    assert usage["promptTokenCount"] == counted["totalTokens"] == len(call.prompt_ids)
    assert usage["candidatesTokenCount"] + usage["thoughtsTokenCount"] == len(call.response_ids)
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP" and chunks[-1]["modelVersion"] == "gemini-2.5-pro"
    assert '"type": ["string", "null"]' in tiny.tokenizer.decode(call.prompt_ids)


def without(parts: list[Any], *keys: str) -> list[Any]:
    """Parts as a client sends them back that drops some of their fields, ids of calls among them."""
    kept = [{key: value for key, value in part.items() if key not in keys} for part in parts]
    for part in kept:
        if "functionCall" in part:
            part["functionCall"] = {key: value for key, value in part["functionCall"].items() if key not in keys}
    return kept


@pytest.mark.parametrize("dropped", [(), ("id",), ("id", "thoughtSignature")])
def test_a_tool_loop_is_one_row_however_its_parts_come_back(tiny: SimpleNamespace, dropped: tuple[str, ...]) -> None:
    async def play(client: httpx.AsyncClient, _: Endpoint) -> None:
        contents: list[Any] = [user("hello")]
        for how in ("whole", "events", "list", "events"):
            chunks = await ask(client, how, contents, systemInstruction={"parts": [{"text": "Be brief."}]})
            parts = [part for chunk in chunks for part in without(chunk["candidates"][0]["content"]["parts"], *dropped)]
            calls = [part["functionCall"] for part in parts if "functionCall" in part]
            contents.append({"role": "model", "parts": parts})
            results = [
                {
                    "functionResponse": {
                        **{k: v for k, v in call.items() if k == "id"},
                        "name": "shell",
                        "response": {"output": "x"},
                    }
                }
                for call in calls
            ]
            contents += [{"role": "user", "parts": results}] if results else []

    record = talk(tiny, TURNS, play).record
    (row,) = rows(record.calls)
    assert trained_text(tiny.tokenizer, row) == "".join(f"{turn}<|im_end|>" for turn in TURNS)
    assert record.drift.left == () and "Be brief." in tiny.tokenizer.decode(row.prompt_ids)


def test_results_without_ids_answer_calls_by_name_then_in_order() -> None:
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("a", "b", "a", "c")]
    results = [
        {"functionResponse": {"name": name, "response": response}}
        for name, response in (
            ("b", {"output": "b"}),
            ("a", {"result": {"n": 1}}),
            ("x", {"error": "e", "n": 1}),
            ("c", {}),
            ("a", {"output": "late"}),
        )
    ]
    body = {"contents": [user("q"), {"role": "model", "parts": calls}, {"role": "function", "parts": results}]}
    messages = read_request(body, model="m", is_stream=False, as_events=False).messages
    turn, *outputs = messages[1:]
    ids = [call.id for call in turn.tool_calls]
    assert len(set(ids)) == 4
    assert [message.tool_call_id for message in outputs] == [ids[1], ids[0], ids[2], ids[3], None]
    assert [message.content for message in outputs] == ["b", '{"n": 1}', '{"error": "e", "n": 1}', "{}", "late"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "contents: expected a list"),
        ({"contents": []}, "contents: expected at least one content"),
        ({"contents": [{"role": "cat", "parts": []}]}, "contents[0].role: expected user, model, function"),
        ({"contents": [{"parts": [{"executable_code": {}}]}]}, "contents[0].parts[0].text: expected a part with text"),
        ({"contents": [user("q")], "tools": [{"google_search": {}}]}, "tools[0].googleSearch: only Google runs"),
        ({"contents": [user("q")], "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "(no tools)"),
        ({"contents": [user("q")], "generationConfig": {"responseMimeType": "text/x.enum"}}, "expected text/plain or"),
        ({"contents": [user("q")], "generationConfig": {"responseModalities": ["AUDIO"]}}, "expected TEXT"),
        (
            {"contents": [user("q")], "generationConfig": {"speechConfig": {"a": 1}}},
            "generationConfig.speechConfig: not supported",
        ),
        ({"contents": [user("q")], "cachedContent": "x"}, "cachedContent: not supported"),
        (
            {"contents": [user("q")], "generationConfig": {"maxOutputTokens": 0}},
            "maxOutputTokens: expected a whole number",
        ),
    ],
)
def test_bad_requests_are_refused_by_field(body: Any, message: str) -> None:
    with pytest.raises(RequestError, match=r"expected|not supported|only Google") as caught:
        read_request(body, model="m", is_stream=False, as_events=True)
    error = error_body(caught.value)["error"]
    assert message in error["message"] and (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")


def test_keys_methods_and_candidates(tiny: SimpleNamespace) -> None:
    async def play(client: httpx.AsyncClient, endpoint: Endpoint) -> None:
        bare = httpx.AsyncClient(base_url=endpoint.url.split("/s/")[0])
        body = {"contents": [user("hello")], "generationConfig": {"candidateCount": 2, "maxOutputTokens": 3}}
        refused = await bare.post(f"{MODEL}:generateContent", json=body)
        assert refused.status_code == 401 and refused.json()["error"]["status"] == "UNAUTHENTICATED"
        answer = await bare.post(f"{MODEL}:generateContent", json=body, params={"key": endpoint.token})
        assert [one["finishReason"] for one in answer.json()["candidates"]] == ["MAX_TOKENS"] * 2
        streamed = (await bare.post(f"{MODEL}:streamGenerateContent", json=body, params={"key": endpoint.token})).json()
        assert [chunk["candidates"][0]["index"] for chunk in streamed] == [0, 1]
        assert (await client.post(f"{MODEL}:embedContent", json=body)).json()["error"]["status"] == "NOT_FOUND"
        assert (await client.get("/v1beta/models")).json()["models"][0]["name"] == "models/policy"
        assert (await client.get("/v1beta/models/any")).json()["name"] == "models/any"
        await bare.aclose()

    assert talk(tiny, ("long answer",), play).record.refused == {404: 1}


def test_an_error_within_a_stream_keeps_its_form(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.server.STREAM_PING_S", 0.02)

    async def run() -> None:
        backend = tiny.backend()

        async def fails(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(0.1)
            raise ValueError("no such token")

        backend.generate = fails
        async with serving(backend, tiny.tokenizer) as gateway:
            endpoint = gateway.endpoint(gateway.open_session())
            async with httpx.AsyncClient(base_url=endpoint.url, headers={"x-goog-api-key": endpoint.token}) as client:
                body = {"contents": [user("q")]}
                listed = await client.post(f"{MODEL}:streamGenerateContent", json=body)
                events = await client.post(f"{MODEL}:streamGenerateContent?alt=sse", json=body)
        errors = [listed.json()[0], *(json.loads(line[6:]) for line in events.text.splitlines() if line)]
        assert [error["error"]["status"] for error in errors] == ["INVALID_ARGUMENT"] * 2

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [False, True])
def test_googles_sdk_plays_a_tool_loop_in_one_row(tiny: SimpleNamespace, is_stream: bool) -> None:
    genai = pytest.importorskip("google.genai", reason="google-genai is not installed")

    async def play(_: httpx.AsyncClient, endpoint: Endpoint) -> str:
        client = genai.Client(api_key=endpoint.token, http_options={"base_url": endpoint.url})
        config = {
            "tools": [{"function_declarations": [SHELL]}],
            "system_instruction": "Be brief.",
            "thinking_config": {"include_thoughts": True},
            "automatic_function_calling": {"disable": True},
        }
        chat = client.aio.chats.create(model="gemini-2.5-pro", config=config)
        message: Any = "hello"
        for _turn in TURNS:
            if is_stream:
                answers = [chunk async for chunk in await chat.send_message_stream(message)]
            else:
                answers = [await chat.send_message(message)]
            calls = [call for answer in answers for call in answer.function_calls or ()]
            respond = genai.types.Part.from_function_response
            message = [respond(name=call.name, response={"output": "x"}) for call in calls]
        assert [model.name async for model in await client.aio.models.list()] == ["models/policy"]
        return "".join(answer.text or "" for answer in answers)

    asked = talk(tiny, TURNS, play)
    (row,) = rows(asked.record.calls)
    assert trained_text(tiny.tokenizer, row) == "".join(f"{turn}<|im_end|>" for turn in TURNS)
    assert asked.result == "Done." and asked.record.drift.left == ()
