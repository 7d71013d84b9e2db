"""OpenAI's SDK talks to the Responses API: whole answers, streams, tools, stored and stateless conversations."""

import asyncio
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from gateway_harness import SHELL, talking, trained_texts
from protocol_turns import THOUGHT, TURNS, writing

TOOL = {"type": "function", **SHELL["function"], "strict": None}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": {"type": "text"}}
SPAWN = {"type": "namespace", "name": "agents", "description": "", "tools": [{**TOOL, "name": "spawn"}]}
TOOLS = [TOOL, PATCH, SPAWN]


async def ask(responses: Any, is_stream: bool, **request: Any) -> Any:
    """One response, whole or put together from its events."""
    request = {"model": "any", "tools": TOOLS, **request}
    if not is_stream:
        return await responses.create(**request)
    events = []
    async with responses.stream(**request) as stream:
        async for event in stream:
            events.append(event)
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in final.output]
    return final


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_has_reasoning_text_calls_and_usage(tiny: SimpleNamespace, is_stream: bool) -> None:
    async with talking(writing(tiny, *TURNS)) as talk:
        include = ["reasoning.encrypted_content"]
        answer = await ask(talk.openai.responses, is_stream, input="hello", include=include)
    (call,) = talk.record.calls
    thought, message, *calls = answer.output
    assert [part.text for part in thought.content] == ["look around "] and thought.encrypted_content
    assert answer.output_text == message.content[0].text == "I look."
    expected = [("function_call", "shell", '{"command": "ls -l"}')] * 2
    assert [(one.type, one.name, one.arguments) for one in calls] == expected
    assert len({one.call_id for one in calls}) == 2 and (answer.status, answer.model) == ("completed", "any")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(call.prompt_ids), len(call.response_ids))
    thought_ids = call.response_ids[: answer.usage.output_tokens_details.reasoning_tokens]
    assert tiny.tokenizer.decode(thought_ids) == "<think>\n\nlook around "


def results(answer: Any) -> list[dict[str, Any]]:
    """An output for each call."""
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    calls = [item for item in answer.output if item.type in kinds]
    return [{"type": kinds[call.type], "call_id": call.call_id, "output": f"file {call.call_id}"} for call in calls]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_conversation_that_the_gateway_keeps_is_one_row(tiny: SimpleNamespace, is_stream: bool) -> None:
    async with talking(writing(tiny, *TURNS)) as talk:
        options = {"instructions": "Be brief."}
        answers = [await ask(talk.openai.responses, is_stream, input="hello", **options)]
        # At the end a branch from the first response, as a client does that tries again.
        for number in (0, 1, 2, 0):
            before = answers[number]
            options["previous_response_id"] = before.id
            answers.append(await ask(talk.openai.responses, is_stream, input=results(before), **options))
    assert [answer.previous_response_id for answer in answers[:2]] == [None, answers[0].id]
    texts = sorted(trained_texts(tiny.tokenizer, talk.record.calls))
    ended = [f"{turn}<|im_end|>" for turn in TURNS]
    assert texts == sorted(["".join(ended), "".join(ended[:2])]) and talk.record.drift.branch_causes == {}
    assert "Be brief." in tiny.tokenizer.decode(talk.record.calls[0].prompt_ids)


async def test_log_probs_and_summaries_come_where_they_are_asked_for(tiny: SimpleNamespace) -> None:
    asked = {"input": "hello", "reasoning": {"summary": "auto"}, "include": ["message.output_text.logprobs"]}
    async with talking(writing(tiny, THOUGHT + "Hi.")) as talk:
        thought, message = (await ask(talk.openai.responses, True, **asked)).output
    (call,) = talk.record.calls
    tokens = message.content[0].logprobs
    assert "".join(token.token for token in tokens) == THOUGHT + "Hi.<|im_end|>"
    assert tuple(token.logprob for token in tokens) == call.log_probs
    assert [part.text for part in thought.summary] == ["look around "] and thought.encrypted_content is None


async def test_stored_responses_are_read_listed_and_deleted_and_the_oldest_forgotten(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [{"role": "user", "content": f"question {number}"} for number in range(5)]
    async with talking(writing(tiny, "Hi.")) as talk:
        responses = talk.openai.responses
        answer = await ask(responses, False, input=sent)
        assert (await responses.retrieve(answer.id)).to_dict() == answer.to_dict()
        found = [item async for item in await responses.input_items.list(answer.id, limit=2, order="asc")]
        assert [item.content[0].text for item in found] == [item["content"] for item in sent]
        assert len({item.id for item in found}) == 5
        await responses.delete(answer.id)
        unstored = await ask(responses, False, input="hello", store=False)
        for name in (answer.id, unstored.id, "resp_unknown"):
            for call in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
                with pytest.raises(openai.NotFoundError, match="not found"):
                    await call(name)
            with pytest.raises(openai.NotFoundError, match="not found") as caught:
                await ask(responses, False, input="go on", previous_response_id=name)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.NotFoundError, match="msg_unknown"):
            await ask(responses, False, input=[{"type": "item_reference", "id": "msg_unknown"}])
        with pytest.raises(openai.BadRequestError, match="background=true"):
            await responses.cancel((await ask(responses, False, input="hello")).id)
        monkeypatch.setattr("tree_rl.rollout.gateway.protocols.openai_responses.store.MAX_STORED_BYTES", 3000)
        answers = [await responses.create(model="m", input="x" * 1000) for _ in range(5)]
        assert (await responses.retrieve(answers[-1].id)).id == answers[-1].id
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(answers[0].id)


async def test_a_response_in_the_background_is_polled_or_cancelled(tiny: SimpleNamespace) -> None:
    backend = tiny.backend()
    async with talking(backend) as talk:
        responses = talk.openai.responses
        begun = await responses.create(model="m", input="go", background=True, max_output_tokens=4)
        assert begun.status == "in_progress"
        while (done := await responses.retrieve(begun.id)).status == "in_progress":
            await asyncio.sleep(0.01)
        assert done.usage.output_tokens <= 4 and done.status in ("completed", "incomplete")
        assert (await responses.cancel(begun.id)).status == done.status
        begun = await responses.create(model="m", input="go", background=True, max_output_tokens=400)
        with pytest.raises(openai.BadRequestError, match="answered"):
            await responses.create(model="m", input="on", previous_response_id=begun.id)
        assert (await responses.cancel(begun.id)).status == "cancelled"
    assert len(talk.record.calls) == 1 and backend.running == 0


async def test_tokens_are_counted_and_what_this_model_lacks_is_left_out_by_name(tiny: SimpleNamespace) -> None:
    tools = [*TOOLS, {"type": "web_search"}, {"type": "tool_search"}]
    picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    asked = {"model": "m", "input": [{"role": "user", "content": [picture]}], "tools": tools}
    async with talking(writing(tiny, "Hi.")) as talk:
        count = await talk.openai.responses.input_tokens.count(**asked)
        answer = await talk.openai.responses.create(**asked)
    assert count.input_tokens == answer.usage.input_tokens
    assert talk.record.left_out == {"image": 1, "web_search": 1, "tool_search": 1}
