"""OpenAI's SDK talks to the Responses API: whole answers, streams, tools, stored and stateless conversations."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from gateway_harness import SHELL, rows, serving, trained_text
from ledger import Ledger
from protocol_turns import CALL, THOUGHT, TURNS, by_turn

TOOL = {"type": "function", **SHELL["function"], "strict": None}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": {"type": "text"}}
SPAWN = {"type": "namespace", "name": "agents", "description": "", "tools": [{**TOOL, "name": "spawn"}]}
TOOLS = [TOOL, PATCH, SPAWN]
HELLO = {"role": "user", "content": "hello"}


def talk(tiny: SimpleNamespace, turns: Sequence[str], play: Any, **options: Any) -> SimpleNamespace:
    """Let `play(responses)` act in one session. Every token must be recorded as it was given."""
    backend = Ledger(tiny.tokenizer, by_turn(turns))

    async def run() -> Any:
        async with serving(backend, tiny.tokenizer, **options) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat:
                result = await play(chat.responses)
            return result, await gateway.close_session(session)

    result, record = asyncio.run(run())
    assert backend.differences(record) == 0
    return SimpleNamespace(result=result, record=record)


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
def test_an_answer_has_reasoning_text_calls_and_usage(tiny: SimpleNamespace, is_stream: bool) -> None:
    async def play(responses: Any) -> Any:
        return await ask(responses, is_stream, input="hello", include=["reasoning.encrypted_content"])

    asked = talk(tiny, TURNS, play)
    answer, (call,) = asked.result, asked.record.calls
    thought, message, *calls = answer.output
    assert [part.text for part in thought.content] == ["look around "] and thought.encrypted_content
    assert answer.output_text == message.content[0].text == "I look."
    assert [(one.type, one.name, one.arguments) for one in calls] == [
        ("function_call", "shell", '{"command": "ls -l"}')
    ] * 2
    assert len({one.call_id for one in calls}) == 2 and (answer.status, answer.model) == ("completed", "any")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(call.prompt_ids), len(call.response_ids))
    thought_ids = call.response_ids[: answer.usage.output_tokens_details.reasoning_tokens]
    assert tiny.tokenizer.decode(thought_ids) == "<think>\n\nlook around "


def results(answer: Any) -> list[dict[str, Any]]:
    """An output for each call."""
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    calls = [item for item in answer.output if item.type in kinds]
    return [{"type": kinds[call.type], "call_id": call.call_id, "output": f"file {call.call_id}"} for call in calls]


def whole(item: dict[str, Any]) -> dict[str, Any]:
    return item


def token_only(item: dict[str, Any]) -> dict[str, Any]:
    """As Codex sends reasoning back."""
    return {key: value for key, value in item.items() if key != "content" or item["type"] != "reasoning"}


def plain_only(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("encrypted_content", "id", "status")}


def reference(item: dict[str, Any]) -> dict[str, Any]:
    """As Vercel's client sends items back that are stored."""
    return {"type": "item_reference", "id": item["id"]}


@pytest.mark.parametrize("form", [whole, token_only, plain_only, reference, "no reasoning", "results between calls"])
def test_a_tool_loop_is_one_row_however_its_items_come_back(tiny: SimpleNamespace, form: Any) -> None:
    async def play(responses: Any) -> None:
        items: list[Any] = [HELLO]
        for number in range(len(TURNS)):
            include = ["reasoning.encrypted_content"] if form is not plain_only else None
            answer = await ask(
                responses,
                number % 2 == 1,
                input=items,
                instructions="Be brief.",
                include=include,
                store=form is reference,
            )
            sent = [item.to_dict() for item in answer.output]
            if form == "no reasoning":
                items += [item for item in sent if item["type"] != "reasoning"] + results(answer)
            elif form == "results between calls":
                outputs = {one["call_id"]: one for one in results(answer)}
                items += [part for item in sent for part in (item, outputs.get(item.get("call_id"))) if part]
            else:
                items += [form(item) for item in sent] + results(answer)

    record = talk(tiny, TURNS, play).record
    (row,) = rows(record.calls)
    assert trained_text(tiny.tokenizer, row) == "".join(f"{turn}<|im_end|>" for turn in TURNS)
    assert record.drift.left == () and "Be brief." in tiny.tokenizer.decode(row.prompt_ids)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_that_the_gateway_keeps_is_one_row(tiny: SimpleNamespace, is_stream: bool) -> None:
    async def play(responses: Any) -> Any:
        answer, answers = None, []
        for _ in TURNS:
            news = (
                {"input": "hello"} if answer is None else {"input": results(answer), "previous_response_id": answer.id}
            )
            answer = await ask(responses, is_stream, instructions="Be brief.", **news)
            answers.append(answer)
        # A branch from the first response, as a client does that tries again.
        first = answers[0]
        again = await ask(
            responses, is_stream, input=results(first), previous_response_id=first.id, instructions="Be brief."
        )
        return [*answers, again]

    asked = talk(tiny, TURNS, play)
    assert [answer.previous_response_id for answer in asked.result[:2]] == [None, asked.result[0].id]
    texts = sorted(trained_text(tiny.tokenizer, row) for row in rows(asked.record.calls))
    ended = [f"{turn}<|im_end|>" for turn in TURNS]
    assert texts == sorted(["".join(ended), "".join(ended[:2])]) and asked.record.drift.left == ()


@pytest.mark.parametrize(
    ("turn", "kind", "name", "namespace", "sent"),
    [
        (CALL % ("apply_patch", '{"input": "*** ü\\n\\"x\\""}'), "custom_tool_call", "apply_patch", None, '*** ü\n"x"'),
        (
            CALL % ("apply_patch", '{"patch": "x", "n": 1}'),
            "custom_tool_call",
            "apply_patch",
            None,
            '{"patch": "x", "n": 1}',
        ),
        (CALL % ("apply_patch", '{"input": ["x"]}'), "custom_tool_call", "apply_patch", None, '["x"]'),
        (CALL % ("agents__spawn", '{"command": "x"}'), "function_call", "spawn", "agents", '{"command": "x"}'),
        (CALL % ("nobody", "{}"), "function_call", "nobody", None, "{}"),
    ],
)
def test_custom_and_namespaced_tools_are_called_and_come_back(
    tiny: SimpleNamespace, turn: str, kind: str, name: str, namespace: str | None, sent: str
) -> None:
    async def play(responses: Any) -> Any:
        answer = await ask(responses, True, input=[HELLO])
        items = [item.to_dict() for item in answer.output]
        # Some clients know no namespaces.
        items = [{key: value for key, value in item.items() if key != "namespace"} for item in items]
        await ask(responses, False, input=[HELLO, *items, *results(answer)])
        return answer

    asked = talk(tiny, (turn, "Done."), play)
    (call,) = asked.result.output
    assert (call.type, call.name, call.namespace) == (kind, name, namespace)
    assert (call.input if kind == "custom_tool_call" else call.arguments) == sent
    assert len(rows(asked.record.calls)) == 1 and asked.record.drift.left == ()


def test_a_limit_leaves_an_answer_incomplete(tiny: SimpleNamespace) -> None:
    async def play(responses: Any) -> Any:
        request = {"model": "m", "input": "hello", "max_output_tokens": 16}
        events = [event async for event in await responses.create(**request, stream=True)]
        return await responses.create(**request), events[-1]

    whole_answer, event = talk(tiny, ("long " * 50,), play).result
    assert event.type == "response.incomplete"
    for answer in (whole_answer, event.response):
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (answer.output[-1].status, answer.usage.output_tokens) == ("incomplete", 16)


def test_log_probs_and_summaries_come_where_they_are_asked_for(tiny: SimpleNamespace) -> None:
    async def play(responses: Any) -> Any:
        request = {"model": "m", "input": "hello", "reasoning": {"summary": "auto"}}
        return await ask(responses, True, **request, include=["message.output_text.logprobs"])

    asked = talk(tiny, (THOUGHT + "Hi.",), play)
    thought, message = asked.result.output
    tokens = message.content[0].logprobs
    assert "".join(token.token for token in tokens) == THOUGHT + "Hi.<|im_end|>"
    assert tuple(token.logprob for token in tokens) == asked.record.calls[0].log_probs
    assert [part.text for part in thought.summary] == ["look around "] and thought.encrypted_content is None


def test_stored_responses_are_read_listed_and_deleted(tiny: SimpleNamespace) -> None:
    async def play(responses: Any) -> None:
        sent = [{"role": "user", "content": f"question {number}"} for number in range(5)]
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

    talk(tiny, ("Hi.",), play)


def test_the_oldest_responses_are_forgotten(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.protocols.openai_responses.store.MAX_STORED_BYTES", 3000)

    async def play(responses: Any) -> None:
        answers = [await responses.create(model="m", input="x" * 1000) for _ in range(5)]
        assert (await responses.retrieve(answers[-1].id)).id == answers[-1].id
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(answers[0].id)

    talk(tiny, ("Hi.",), play)


def test_a_response_in_the_background_is_polled_or_cancelled(tiny: SimpleNamespace) -> None:
    async def run() -> None:
        backend = tiny.backend()
        async with serving(backend, tiny.tokenizer) as gateway:
            session = gateway.open_session()
            endpoint = gateway.endpoint(session)
            async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat:
                create = chat.responses.create
                begun = await create(model="m", input="go", background=True, max_output_tokens=4)
                assert begun.status == "in_progress"
                while (done := await chat.responses.retrieve(begun.id)).status == "in_progress":
                    await asyncio.sleep(0.01)
                assert done.usage.output_tokens <= 4 and done.status in ("completed", "incomplete")
                assert (await chat.responses.cancel(begun.id)).status == done.status
                begun = await create(model="m", input="go", background=True, max_output_tokens=400)
                with pytest.raises(openai.BadRequestError, match="answered"):
                    await create(model="m", input="on", previous_response_id=begun.id)
                assert (await chat.responses.cancel(begun.id)).status == "cancelled"
            record = await gateway.close_session(session)
        assert len(record.calls) == 1 and backend.running == 0

    asyncio.run(run())


def test_an_error_within_a_stream_is_raised_by_the_sdk(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_rl.rollout.gateway.server.STREAM_PING_S", 0.02)

    async def fails(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0.1)
        raise ValueError("no such token")

    async def run() -> None:
        backend = tiny.backend()
        backend.generate = fails
        async with serving(backend, tiny.tokenizer) as gateway:
            session = gateway.open_session()
            endpoint = gateway.endpoint(session)
            async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat:
                with pytest.raises(openai.APIError, match="no such token"):
                    async for _ in await chat.responses.create(model="m", input="go", stream=True):
                        pass
                begun = await chat.responses.create(model="m", input="go", background=True)
                await asyncio.sleep(0.2)
                failed = await chat.responses.retrieve(begun.id)
                assert (failed.status, failed.error.code) == ("failed", "invalid_prompt")

    asyncio.run(run())


def test_tokens_are_counted_and_tools_of_openai_are_left_out_by_name(tiny: SimpleNamespace) -> None:
    async def play(responses: Any) -> Any:
        tools = [*TOOLS, {"type": "web_search"}, {"type": "tool_search"}]
        count = await responses.input_tokens.count(model="m", input="hello", tools=tools, instructions="Be brief.")
        return count, await ask(responses, False, input="hello", tools=tools, instructions="Be brief.")

    asked = talk(tiny, ("Hi.",), play)
    count, answer = asked.result
    assert count.input_tokens == answer.usage.input_tokens
    assert asked.record.left_out == {"web_search": 1, "tool_search": 1}
