"""The official SDKs talk to the real server: whole answers, streams, tools, several choices, stop texts, log-probs.

Every protocol answers with and without its version, below a session's address or an agent's, and by the key.
"""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import SHELL, talking, trained_texts, user
from protocol_turns import shell

CALL = shell("ls -l")
THOUGHT = "<think>\nlook around\n</think>\n\n"
ANTHROPIC_SHELL = {"name": "shell", "description": "Run.", "input_schema": SHELL["function"]["parameters"]}


async def test_an_openai_stream_adds_up_to_the_whole_answer(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend({"hello": THOUGHT + "I look.\n" + CALL})) as talk:
        options = {"tools": [SHELL], "logprobs": True}
        whole = await talk.ask("hello", **options)
        completions = talk.openai.chat.completions
        options |= {"model": "m", "messages": [user("hello")], "stream_options": {"include_usage": True}}
        async with completions.stream(**options) as stream:
            streamed = await stream.get_final_completion()
    call = talk.record.calls[0]
    assert (call.min_version, call.agent, call.turn) == (7, "main", 0)
    for completion in (whole, streamed):
        (choice,) = completion.choices
        assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "look around")
        called = choice.message.tool_calls[0].function
        assert (called.name, json.loads(called.arguments)) == ("shell", {"command": "ls -l"})
        assert (choice.finish_reason, completion.model) == ("tool_calls", "m")
        assert completion.usage.prompt_tokens == len(call.prompt_ids)
        assert completion.usage.completion_tokens == len(call.response_ids) == len(choice.logprobs.content)
        assert all(token.logprob < 0 for token in choice.logprobs.content)
        assert "".join(token.token for token in choice.logprobs.content) == f"{THOUGHT}I look.\n{CALL}<|im_end|>"


async def test_an_anthropic_client_reads_thinking_text_and_tool_use(tiny: SimpleNamespace) -> None:
    asked = {"model": "claude", "messages": [user("hello")], "tools": [ANTHROPIC_SHELL]}
    asked["system"] = [{"type": "text", "text": "Be brief."}]
    async with talking(tiny.backend({"hello": THOUGHT + "I look.\n" + CALL})) as talk:
        whole = await talk.anthropic.messages.create(**asked, max_tokens=300)
        async with talk.anthropic.messages.stream(**asked, max_tokens=300) as stream:
            streamed = await stream.get_final_message()
        count = await talk.anthropic.messages.count_tokens(**asked)
    for message in (whole, streamed):
        thinking, text, use = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "look around")
        assert (text.type, text.text) == ("text", "I look.")
        assert (use.type, use.name, use.input) == ("tool_use", "shell", {"command": "ls -l"})
        assert (message.stop_reason, message.model) == ("tool_use", "claude")
    call, _ = talk.record.calls  # counting tokens records nothing
    assert streamed.usage.output_tokens == whole.usage.output_tokens == len(call.response_ids)
    assert count.input_tokens == whole.usage.input_tokens == len(call.prompt_ids)
    assert "Be brief." in tiny.tokenizer.decode(call.prompt_ids)


async def test_n_answers_are_siblings_behind_one_prompt(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend()) as talk:
        whole = await talk.ask("go", n=3, max_tokens=12)
        parts: dict[int, str] = {}
        async for chunk in await talk.ask("go", n=2, max_tokens=12, stream=True):
            for choice in chunk.choices:
                parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
    texts = [choice.message.content for choice in whole.choices] + [parts[0], parts[1]]
    assert len(set(texts)) == 5
    assert len({call.prompt_ids for call in talk.record.calls}) == 1
    assert sorted(tiny.tokenizer.decode(call.response_ids) for call in talk.record.calls) == sorted(texts)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3


@pytest.mark.parametrize("stop", ["Observation:", ["never", "Observation:"]])
async def test_a_stop_text_ends_the_turn_and_stays_out_of_it(tiny: SimpleNamespace, stop: Any) -> None:
    async with talking(tiny.backend({"go": "Action: ls\nObservation: I make things up"})) as talk:
        (choice,) = (await talk.ask("go", stop=stop)).choices
        stops = [stop] if isinstance(stop, str) else stop
        options = {"model": "m", "messages": [user("go")], "max_tokens": 300}
        message = await talk.anthropic.messages.create(**options, stop_sequences=stops)
    assert (choice.message.content, choice.finish_reason) == ("Action: ls\n", "stop")
    assert message.content[0].text == "Action: ls\n"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Observation:")
    assert set(trained_texts(tiny.tokenizer, talk.record.calls)) == {"Action: ls\nObservation:"}


async def test_a_stop_text_behind_a_call_does_not_hide_it(tiny: SimpleNamespace) -> None:
    async with talking(tiny.scripted(*[f"{CALL}\nObservation: a.txt"] * 2)) as talk:
        (choice,) = (await talk.ask("go", tools=[SHELL], stop=["Observation:"])).choices
        options = {"model": "m", "messages": [user("go")], "max_tokens": 300, "stop_sequences": ["Observation:"]}
        message = await talk.anthropic.messages.create(**options, tools=[ANTHROPIC_SHELL])
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
    assert (message.stop_reason, message.stop_sequence, message.content[0].type) == ("tool_use", None, "tool_use")


@pytest.mark.parametrize(("source", "temperature"), [("trainer", 1.0), ("agent", 0.3)])
async def test_turns_are_sampled_as_the_trainer_or_the_agent_says(
    tiny: SimpleNamespace, source: str, temperature: float
) -> None:
    backend = tiny.backend()
    async with talking(backend, sampling_from=source) as talk:
        await talk.ask("go", temperature=0.3, max_tokens=3)
    assert [one["temperature"] for one in backend.samplings] == [temperature]


CHAT = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 2}
INPUT = {"input": "q", "max_output_tokens": 2}
CONTENTS = {"contents": [{"parts": [{"text": "q"}]}], "generationConfig": {"maxOutputTokens": 2}}
BODIES = {
    **dict.fromkeys(("/chat/completions", "/messages", "/messages/count_tokens"), CHAT),
    **dict.fromkeys(("/responses", "/responses/input_tokens"), INPUT),
}
OF_GEMINI = dict.fromkeys(("/models/a/b:generateContent", "/models/a:countTokens"), CONTENTS)
PATHS = {
    **{version + path: body for version in ("", "/v1") for path, body in BODIES.items()},
    **{version + path: body for version in ("", "/v1", "/v1beta") for path, body in OF_GEMINI.items()},
}


async def test_every_path_answers_below_every_address(tiny: SimpleNamespace) -> None:
    agents = []
    async with talking(tiny.backend()) as talk:
        for sdk in (talk.openai, talk.anthropic):
            assert [model.id async for model in sdk.models.list()] == ["policy"]
        client, url = talk.http, talk.endpoint.url
        root, of_x = url.split("/s/")[0], talk.endpoint.named("x").url
        for address, agent in {url: "main", of_x: "x", root: "main", f"{root}/a/y": "y"}.items():
            for path, body in PATHS.items():
                answer = await client.post(address + path, json=body)
                assert answer.status_code == 200, (address, path, answer.text)
                agents += [] if "oken" in path.rsplit("/", 1)[1] else [agent]
            for version in ("", "/v1", "/v1beta"):
                assert "policy" in (await client.get(f"{address}{version}/models")).text
                assert "org/name" in (await client.get(f"{address}{version}/models/org/name")).text
            stored = (await client.post(f"{address}/v1/responses", json=INPUT)).json()["id"]
            agents.append(agent)
            for version in ("", "/v1"):
                of_it = f"{address}{version}/responses/{stored}"
                assert (await client.get(of_it)).json()["id"] == stored
                assert len((await client.get(f"{of_it}/input_items")).json()["data"]) == 1
                assert (await client.post(f"{of_it}/cancel")).status_code == 400
            assert (await client.delete(f"{address}/responses/{stored}")).json()["deleted"]
        for header in ("x-agent-name", "x-claude-code-agent-id"):
            await client.post(f"{url}/v1/responses", json=INPUT, headers={header: "writer"})
    calls = talk.record.calls
    assert [call.agent for call in calls] == [*agents, "writer", "writer"]


async def test_nobody_reads_the_responses_of_another_session(tiny: SimpleNamespace) -> None:
    async with talking(tiny.backend()) as talk, httpx.AsyncClient() as client:
        mine, other = talk.endpoint, talk.gateway.endpoint(talk.gateway.open_session())
        root = mine.url.split("/s/")[0]
        stored = (await talk.http.post("/responses", json=INPUT)).json()["id"]
        mixed = [(mine.url, other.token, 401), (other.url, other.token, 404), (root, other.token, 404)]
        for base, token, status in (*mixed, (root, "wrong", 401), (root, mine.token, 200)):
            key = {"authorization": f"Bearer {token}"}
            answer = await client.get(f"{base}/responses/{stored}", headers=key)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["message"]
        key, body = {"x-api-key": other.token}, {**INPUT, "previous_response_id": stored}
        assert (await client.post(f"{other.url}/responses", json=body, headers=key)).status_code == 404
