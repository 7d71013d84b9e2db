"""Real SDK clients, the gateway, verl's client and vLLM: what is recorded is what vLLM generated, and trains."""

import time
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from verl_server import CONTEXT_TOKENS, ask, branching_talk, check_calls, check_rows, user
from vllm_harness import check_agreement

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]


def test_calls_and_rows_hold_what_vllm_generated_and_the_tree_engine_agrees(served: SimpleNamespace) -> None:
    """On every trained token; it notices a foreign one."""
    conversation = ask(served, branching_talk)
    check_calls(conversation)
    said = dict(conversation.result)
    tokens = "".join(token for token, _ in said.pop("openai tokens"))
    assert tokens.replace("<|im_end|>", "") == said["openai"]
    written = {served.tokenizer.decode(one.response_ids).replace("<|im_end|>", "") for one in conversation.seen}
    assert set(said.values()) <= written
    check_rows(served, conversation.record)
    check_agreement(served, conversation.record.calls)


def test_turns_end_by_their_end_token_a_limit_or_a_stop_text(served: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        options: dict[str, Any] = {"model": "m", "messages": [user("write")]}
        many = await chat.chat.completions.create(n=8, max_tokens=300, **options)
        stopped = await chat.chat.completions.create(max_tokens=300, stop=["e"], **options)
        return many, stopped

    asked = ask(served, talk)
    many, stopped = asked.result
    end = served.tokenizer.eos_token_id
    ends = sorted("stop" if one.response_ids[-1] == end else "length" for one in asked.seen[:8])
    assert sorted(choice.finish_reason for choice in many.choices) == ends
    assert set(ends) == {"stop", "length"}
    assert all(len(one.response_ids) == 300 for one in asked.seen[:8] if one.response_ids[-1] != end)
    assert stopped.choices[0].finish_reason == "stop" and "e" not in stopped.choices[0].message.content
    last = asked.record.calls[-1]
    text = served.tokenizer.decode(last.response_ids)
    assert text.count("e") == 1 and stopped.choices[0].message.content == text.split("e")[0]


def test_what_vllm_refuses_reaches_the_agent_as_its_own_mistake(served: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        with pytest.raises(openai.BadRequestError, match="leaves no room to generate") as refused:
            await chat.chat.completions.create(model="m", messages=[user("x y " * CONTEXT_TOKENS)], max_tokens=5)
        after = await chat.chat.completions.create(model="m", messages=[user("and now?")], max_tokens=5)
        return refused.value.status_code, after

    asked = ask(served, talk, max_context_tokens=100 * CONTEXT_TOKENS)
    status, after = asked.result
    assert status == 400 and asked.record.refused == {400: 1}
    assert len(asked.record.calls) == 1 and after.usage.completion_tokens == 5


def test_an_agent_that_leaves_costs_the_others_nothing(served: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> float:
        options: dict[str, Any] = {"model": "m", "max_tokens": 500}
        with pytest.raises(openai.APITimeoutError):
            await chat.with_options(timeout=0.3).chat.completions.create(messages=[user("a long answer")], **options)
        started = time.monotonic()
        await chat.chat.completions.create(model="m", messages=[user("short")], max_tokens=2)
        return time.monotonic() - started

    asked = ask(served, talk)
    assert asked.record.cancelled == 1
    assert [len(call.response_ids) for call in asked.record.calls] == [2]
