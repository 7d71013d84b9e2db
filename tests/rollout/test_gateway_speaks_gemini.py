"""Gemini's clients: raw requests as Google documents them."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import talking
from protocol_turns import LS, THOUGHT, writing

from tree_rl.rollout.gateway.protocols.gemini import read_request
from tree_rl.rollout.gateway.protocols.tool_results import answered_calls, with_ids_of_calls

SCHEMA = {
    "type": "OBJECT",
    "properties": {"command": {"type": "STRING", "nullable": True}},
    "propertyOrdering": ["command"],
}
SHELL = {"name": "shell", "description": "Run.", "parameters": SCHEMA}
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
        (call,) = (await talk.close()).calls
    thought, text, *calls = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert (thought["text"], thought["thought"]) == ("look around ", True)
    assert text["text"] == "I look." and "thoughtSignature" in text
    assert [(call["functionCall"]["name"], call["functionCall"]["args"]) for call in calls] == [
        ("shell", {"command": "ls -l"})
    ] * 2
    usage = chunks[-1]["usageMetadata"]
    assert usage["promptTokenCount"] == counted.json()["totalTokens"] == len(call.prompt_ids)
    assert usage["candidatesTokenCount"] + usage["thoughtsTokenCount"] == len(call.response_ids)
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP" and chunks[-1]["modelVersion"] == "gemini-2.5-pro"
    assert '"type": ["string", "null"]' in tiny.tokenizer.decode(call.prompt_ids)


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
    # As `OwnTurns.restore` does for every protocol.
    turn, *outputs = with_ids_of_calls(messages, answered_calls(messages))[1:]
    ids = [call.id for call in turn.tool_calls]
    assert len(set(ids)) == 4
    assert [message.tool_call_id for message in outputs] == [ids[1], ids[0], ids[2], ids[3], None]
    assert [message.content for message in outputs] == ["b", '{"n": 1}', '{"error": "e", "n": 1}', "{}", "late"]


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
        record = await talk.close()
    assert refused.status_code == 401 and refused.json()["error"]["status"] == "UNAUTHENTICATED"
    assert [one["finishReason"] for one in answer.json()["candidates"]] == ["MAX_TOKENS"] * 2
    assert [chunk["candidates"][0]["index"] for chunk in streamed] == [0, 1]
    assert unknown.json()["error"]["status"] == "NOT_FOUND" and record.refused == {404: 1}
