"""Gemini's clients: raw requests as Google documents them."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import talking
from protocol_turns import LS, THOUGHT, writing

from tree_rl.rollout.gateway.protocols.gemini import read_request

SCHEMA = {"type": "OBJECT", "properties": {"command": {"type": "STRING", "nullable": True}}}
SHELL = {"name": "shell", "parameters": {**SCHEMA, "propertyOrdering": ["command"]}}
MODEL = "/v1beta/models/gemini-2.5-pro"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text}]}


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
async def test_an_answer_has_thoughts_text_calls_and_usage(tiny: SimpleNamespace, how: str) -> None:
    request = {"contents": [user("hello")], "tools": [{"function_declarations": [SHELL]}]}
    async with talking(writing(tiny, THOUGHT + "I look.\n" + LS + LS)) as talk:
        config = {"thinkingConfig": {"includeThoughts": True}}
        chunks = await ask(talk.http, how, [user("hello")], generationConfig=config)
        counted = await talk.http.post(f"{MODEL}:countTokens", json={"generateContentRequest": request})
    (call,) = talk.record.calls
    thought, text, *calls = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert (thought["text"], thought["thought"]) == ("look around ", True)
    assert text["text"] == "I look." and "thoughtSignature" in text
    called = [(one["functionCall"]["name"], one["functionCall"]["args"]) for one in calls]
    assert called == [("shell", {"command": "ls -l"})] * 2
    usage = chunks[-1]["usageMetadata"]
    assert usage["promptTokenCount"] == counted.json()["totalTokens"] == len(call.prompt_ids)
    assert usage["candidatesTokenCount"] + usage["thoughtsTokenCount"] == len(call.response_ids)
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP" and chunks[-1]["modelVersion"] == "gemini-2.5-pro"
    assert '"type": ["string", "null"]' in tiny.tokenizer.decode(call.prompt_ids)


def test_calls_without_ids_get_some_and_results_keep_their_names() -> None:
    results: list[tuple[str, dict[str, Any]]] = [("b", {"output": "b"}), ("a", {"result": {"n": 1}})]
    results += [("x", {"error": "e", "n": 1}), ("c", {})]
    parts = [{"functionResponse": {"name": name, "response": response}} for name, response in results]
    calls = {"role": "model", "parts": [{"functionCall": {"name": "a", "args": {}}}] * 2}
    body = {"contents": [user("q"), calls, {"role": "function", "parts": parts}]}
    _, turn, *outputs = read_request(body, model="m", is_stream=False, as_events=False).messages
    assert len({call.id for call in turn.tool_calls}) == 2
    told = ["b", '{"n": 1}', '{"error": "e", "n": 1}', "{}"]
    expected = [("tool", None, name, text) for (name, _), text in zip(results, told, strict=True)]
    assert [(one.role, one.tool_call_id, one.name, one.content) for one in outputs] == expected


async def test_keys_methods_and_candidates(tiny: SimpleNamespace) -> None:
    body = {"contents": [user("hello")], "generationConfig": {"candidateCount": 2, "maxOutputTokens": 3}}
    async with talking(writing(tiny, "long answer")) as talk:
        key = {"key": talk.endpoint.token}
        async with httpx.AsyncClient(base_url=talk.endpoint.url.split("/s/")[0]) as bare:
            refused = await bare.post(f"{MODEL}:generateContent", json=body)
            answer = await bare.post(f"{MODEL}:generateContent", json=body, params=key)
            streamed = (await bare.post(f"{MODEL}:streamGenerateContent", json=body, params=key)).json()
            listed = await bare.get("/v1beta/models", headers={"x-goog-api-key": talk.endpoint.token})
        assert listed.json()["models"][0]["name"] == "models/policy"
        assert (await talk.http.get("/v1beta/models/any")).json()["name"] == "models/any"
        unknown = await talk.http.post(f"{MODEL}:embedContent", json=body)
    assert refused.status_code == 401 and refused.json()["error"]["status"] == "UNAUTHENTICATED"
    assert [one["finishReason"] for one in answer.json()["candidates"]] == ["MAX_TOKENS"] * 2
    assert [chunk["candidates"][0]["index"] for chunk in streamed] == [0, 1]
    assert unknown.json()["error"]["status"] == "NOT_FOUND" and talk.record.refused == {404: 1}
