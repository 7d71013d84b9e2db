"""The official SDKs talk to the real server: whole answers, streams, tools, several choices, stop texts, log-probs."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from gateway_harness import SHELL, rows, serving, trained_text

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -l"}}\n</tool_call>'
THOUGHT = "<think>\nlook around\n</think>\n\n"
ANTHROPIC_SHELL = {"name": "shell", "description": "Run.", "input_schema": SHELL["function"]["parameters"]}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(tiny: SimpleNamespace, answers: dict[str, Any] | None, talk: Any, **options: Any) -> Any:
    """Run `talk(openai client, anthropic client)` against a gateway; return its result and the session's record."""

    async def run() -> Any:
        backend = tiny.backend(answers)
        async with serving(backend, tiny.tokenizer, **options) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            async with (
                openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat,
                anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as messages,
            ):
                result = await talk(chat, messages)
            return SimpleNamespace(result=result, record=await gateway.close_session(session), backend=backend)

    return asyncio.run(run())


def test_an_openai_client_reads_text_reasoning_usage_and_finish_reason(tiny: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        return await chat.chat.completions.create(model="any", messages=[user("hello")])

    asked = ask(tiny, {"hello": THOUGHT + "Hi."}, talk)
    choice = asked.result.choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == ("Hi.", "look around")
    assert (choice.finish_reason, asked.result.model, choice.message.tool_calls) == ("stop", "any", None)
    (call,) = asked.record.calls
    assert asked.result.usage.prompt_tokens == len(call.prompt_ids)
    assert asked.result.usage.completion_tokens == len(call.response_ids)
    assert (call.min_version, call.agent, call.turn) == (7, "main", 0)


def test_an_openai_stream_adds_up_to_the_whole_answer(tiny: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        options = {"model": "m", "messages": [user("hello")], "tools": [SHELL], "logprobs": True}
        whole = await chat.chat.completions.create(**options)
        async with chat.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
            async for _event in stream:
                pass
        return whole, await stream.get_final_completion()

    whole, streamed = ask(tiny, {"hello": THOUGHT + "I look.\n" + CALL}, talk).result
    assert streamed.choices[0].message.content == whole.choices[0].message.content == "I look."
    calls = [choice.message.tool_calls[0].function for choice in (whole.choices[0], streamed.choices[0])]
    assert [call.name for call in calls] == ["shell", "shell"]
    assert [json.loads(call.arguments) for call in calls] == [{"command": "ls -l"}] * 2
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    assert streamed.usage == whole.usage
    for completion in (whole, streamed):
        tokens = completion.choices[0].logprobs.content
        assert len(tokens) == whole.usage.completion_tokens and all(token.logprob < 0 for token in tokens)
        assert "".join(token.token for token in tokens) == THOUGHT + "I look.\n" + CALL + "<|im_end|>"


def test_an_anthropic_client_reads_thinking_text_and_tool_use(tiny: SimpleNamespace) -> None:
    async def talk(_: Any, messages: anthropic.AsyncAnthropic) -> Any:
        options: dict[str, Any] = {
            "model": "claude",
            "max_tokens": 300,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [user("hello")],
            "tools": [ANTHROPIC_SHELL],
        }
        whole = await messages.messages.create(**options)
        async with messages.messages.stream(**options) as stream:
            async for _event in stream:
                pass
        count = await messages.messages.count_tokens(
            **{key: options[key] for key in ("model", "system", "messages", "tools")}
        )
        return whole, await stream.get_final_message(), count

    asked = ask(tiny, {"hello": THOUGHT + "I look.\n" + CALL}, talk)
    whole, streamed, count = asked.result
    for message in (whole, streamed):
        thinking, text, use = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "look around")
        assert (text.type, text.text) == ("text", "I look.")
        assert (use.type, use.name, use.input) == ("tool_use", "shell", {"command": "ls -l"})
        assert (message.stop_reason, message.model) == ("tool_use", "claude")
    assert streamed.usage.output_tokens == whole.usage.output_tokens == len(asked.record.calls[0].response_ids)
    assert count.input_tokens == whole.usage.input_tokens == len(asked.record.calls[0].prompt_ids)
    assert "Be brief." in tiny.tokenizer.decode(asked.record.calls[0].prompt_ids)
    assert len(asked.record.calls) == 2, "counting tokens records nothing"


def test_n_answers_are_siblings_behind_one_prompt(tiny: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        whole = await chat.chat.completions.create(model="m", messages=[user("go")], n=3, max_tokens=12)
        parts: dict[int, str] = {}
        async for chunk in await chat.chat.completions.create(
            model="m", messages=[user("go")], n=2, max_tokens=12, stream=True
        ):
            for choice in chunk.choices:
                parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
        return whole, parts

    asked = ask(tiny, None, talk)
    whole, parts = asked.result
    texts = [choice.message.content for choice in whole.choices] + [parts[0], parts[1]]
    assert len(set(texts)) == 5
    assert len({call.prompt_ids for call in asked.record.calls}) == 1
    assert sorted(tiny.tokenizer.decode(call.response_ids) for call in asked.record.calls) == sorted(texts)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3


@pytest.mark.parametrize("stop", ["Observation:", ["never", "Observation:"]])
def test_a_stop_text_ends_the_turn_and_stays_out_of_it(tiny: SimpleNamespace, stop: Any) -> None:
    async def talk(chat: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        return (
            await chat.chat.completions.create(model="m", messages=[user("go")], stop=stop),
            await messages.messages.create(model="m", messages=[user("go")], max_tokens=300, stop_sequences=stops),
        )

    asked = ask(tiny, {"go": "Action: ls\nObservation: I make things up"}, talk)
    openai_answer, anthropic_answer = asked.result
    assert openai_answer.choices[0].message.content == "Action: ls\n"
    assert openai_answer.choices[0].finish_reason == "stop"
    assert anthropic_answer.content[0].text == "Action: ls\n"
    assert (anthropic_answer.stop_reason, anthropic_answer.stop_sequence) == ("stop_sequence", "Observation:")
    for row in rows(asked.record.calls):
        assert trained_text(tiny.tokenizer, row) == "Action: ls\nObservation:"


def test_a_long_turn_with_a_stop_text_is_generated_in_slices_and_recorded_as_one(tiny: SimpleNamespace) -> None:
    written = " ".join(f"word{number}" for number in range(120)) + " STOP and more"

    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        return await chat.chat.completions.create(model="m", messages=[user("go")], stop="STOP", max_tokens=1000)

    async def run() -> Any:
        ids = tiny.tokenizer.encode(written, add_special_tokens=False)
        backend = tiny.backend()
        backend.script = lambda prompt: ids[len(backend.prompts[-1]) - len(backend.prompts[0]) :]
        async with serving(backend, tiny.tokenizer, max_turn_tokens=2000) as gateway:
            session = gateway.open_session()
            endpoint = gateway.endpoint(session)
            async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as chat:
                answer = await talk(chat, None)
            return answer, await gateway.close_session(session), backend

    answer, record, backend = asyncio.run(run())
    assert answer.choices[0].message.content == written.split("STOP")[0]
    (call,) = record.calls
    assert tiny.tokenizer.decode(call.response_ids) == written.split(" and")[0]
    assert len(backend.prompts) > 2 and [len(p) for p in backend.prompts] == sorted(len(p) for p in backend.prompts)


def test_turns_of_the_trainer_are_sampled_as_the_trainer_says(tiny: SimpleNamespace) -> None:
    seen: list[dict[str, Any]] = []

    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        await chat.chat.completions.create(model="m", messages=[user("go")], temperature=0.3, max_tokens=3)

    for source in ("trainer", "agent"):
        backend = tiny.backend()
        generate = backend.generate

        async def spy(*args: Any, generate: Any = generate, **kwargs: Any) -> Any:
            seen.append(dict(kwargs["sampling"]))
            return await generate(*args, **kwargs)

        backend.generate = spy
        ask(SimpleNamespace(tokenizer=tiny.tokenizer, backend=lambda _, b=backend: b), None, talk, sampling_from=source)
    assert [sampling["temperature"] for sampling in seen] == [1.0, 0.3]


def test_models_are_listed_in_each_protocol(tiny: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> Any:
        return (
            [model.id async for model in chat.models.list()],
            [model.id async for model in messages.models.list()],
            (await chat.models.retrieve("org/name")).id,
        )

    assert ask(tiny, None, talk).result == (["policy"], ["policy"], "org/name")


def test_sub_agents_name_themselves_by_address_or_header(tiny: SimpleNamespace) -> None:
    async def run() -> Any:
        async with serving(tiny.backend(), tiny.tokenizer) as gateway:
            session = gateway.open_session()
            endpoint = gateway.endpoint(session).named("searcher")
            async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as chat:
                await chat.chat.completions.create(model="m", messages=[user("a")], max_tokens=2)
                await chat.chat.completions.create(
                    model="m",
                    max_tokens=2,
                    messages=[user("a"), {"role": "assistant", "content": "b"}, user("c")],
                )
            plain = gateway.endpoint(session)
            async with openai.AsyncOpenAI(
                base_url=plain.openai_url, api_key=plain.token, default_headers={"x-agent-name": "writer"}
            ) as chat:
                await chat.chat.completions.create(model="m", messages=[user("a")], max_tokens=2)
            return await gateway.close_session(session)

    record = asyncio.run(run())
    assert [(call.agent, call.turn) for call in record.calls] == [("searcher", 0), ("searcher", 1), ("writer", 0)]


def test_a_token_alone_names_its_session(tiny: SimpleNamespace) -> None:
    async def run() -> Any:
        async with serving(tiny.backend(), tiny.tokenizer) as gateway:
            sessions = [gateway.open_session(), gateway.open_session()]
            address = gateway.endpoint(sessions[0]).url.split("/s/")[0]
            for session in sessions:
                async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=session.token) as chat:
                    await chat.chat.completions.create(model="m", messages=[user("a")], max_tokens=2)
            return [await gateway.close_session(session) for session in sessions]

    assert [len(record.calls) for record in asyncio.run(run())] == [1, 1]
