"""Real SDK clients, the gateway, verl's client and vLLM: what is recorded is what vLLM generated, and trains."""

import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import torch
from verl_server import CONTEXT_TOKENS, VERSION, ask, user
from vllm_harness import LOG_PROB_TOLERANCE, engine_log_probs

from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.tree.forest import Forest

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def conversation(served: SimpleNamespace) -> SimpleNamespace:
    """Five ways to ask, three of which go on from an answer: a session that branches."""

    async def talk(chat: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> dict[str, str]:
        said = {}
        opening = [user("every unique token of the forest stands once, and a row reads its own path from root to leaf")]
        options: dict[str, Any] = {"model": "m", "max_tokens": 40}
        whole = await chat.chat.completions.create(messages=opening, logprobs=True, **options)
        said["openai"] = whole.choices[0].message.content or ""
        said["openai tokens"] = "".join(token.token for token in whole.choices[0].logprobs.content)
        more = [*opening, whole.choices[0].message.model_dump(), user("and its segments?")]
        chunks = await chat.chat.completions.create(messages=more, stream=True, **options)
        said["openai stream"] = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        several = await chat.chat.completions.create(messages=opening, n=2, **options)
        said |= {f"openai n {index}": choice.message.content or "" for index, choice in enumerate(several.choices)}
        back = [*opening, {"role": "assistant", "content": said["openai"]}, user("what does a tool return?")]
        answer = await messages.messages.create(messages=back, **options)
        said["anthropic"] = "".join(block.text for block in answer.content if block.type == "text")
        back += [{"role": "assistant", "content": said["anthropic"]}, user("go on")]
        async with messages.messages.stream(messages=back, **options) as events:
            async for _event in events:
                pass
        final = await events.get_final_message()
        said["anthropic stream"] = "".join(block.text for block in final.content if block.type == "text")
        return said

    return ask(served, talk)


def test_recorded_calls_are_what_vllm_was_asked_and_answered(
    served: SimpleNamespace, conversation: SimpleNamespace
) -> None:
    calls = {(call.prompt_ids, call.response_ids, call.log_probs) for call in conversation.record.calls}
    assert calls == {(one.prompt_ids, one.token_ids, one.log_probs) for one in conversation.seen}
    assert len(calls) == 6
    decode = served.tokenizer.decode
    written = {decode(one.token_ids).replace("<|im_end|>", "") for one in conversation.seen}
    said = conversation.result
    assert {text for name, text in said.items() if name != "openai tokens"} <= written
    assert said["openai tokens"].replace("<|im_end|>", "") == said["openai"]
    assert all(call.log_probs is not None and call.response_ids for call in conversation.record.calls)


def test_every_call_carries_the_version_of_the_weights(conversation: SimpleNamespace) -> None:
    assert {(call.min_version, call.max_version) for call in conversation.record.calls} == {(VERSION, VERSION)}


def test_rows_train_what_was_generated_and_nothing_else(served: SimpleNamespace, conversation: SimpleNamespace) -> None:
    from gateway_harness import check_record
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(served.model, dtype=torch.float32).eval()
    check_record(SimpleNamespace(model=model), conversation.record)


def test_the_tree_engine_agrees_with_vllm_on_every_trained_token(
    served: SimpleNamespace, conversation: SimpleNamespace
) -> None:
    rows = rows_of_calls(conversation.record.calls)
    forest = Forest.from_rows([np.asarray(row.token_ids) for row in rows])
    assert len(rows) >= 4 and forest.num_unique < 0.8 * forest.num_flat
    trained, worst = 0, 0.0
    for row, replayed in zip(rows, engine_log_probs(served, rows), strict=True):
        assert row.response_log_probs is not None
        for mask, drawn, again in zip(row.response_mask, row.response_log_probs, replayed, strict=True):
            if mask:
                trained += 1
                worst = max(worst, abs(drawn - again))
    print(f"\n{trained} trained tokens, largest difference of log-probs {worst:.2e}")
    assert trained >= 150
    assert worst < LOG_PROB_TOLERANCE


def test_the_agreement_notices_one_foreign_token(served: SimpleNamespace, conversation: SimpleNamespace) -> None:
    row = rows_of_calls(conversation.record.calls)[0]
    assert row.response_log_probs is not None
    foreign = (row.response_ids[3] + 1) % len(served.tokenizer)
    changed = replace(row, response_ids=(*row.response_ids[:3], foreign, *row.response_ids[4:]))
    (replayed,) = engine_log_probs(served, [changed])
    differences = [abs(a - b) for a, b in zip(row.response_log_probs, replayed, strict=True)]
    behind = [difference for difference, mask in zip(differences[3:30], row.response_mask[3:30], strict=True) if mask]
    assert max(differences[:3]) < LOG_PROB_TOLERANCE
    assert median(behind) > 100 * LOG_PROB_TOLERANCE


def test_turns_end_by_their_end_token_a_limit_or_a_stop_text(served: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
        options: dict[str, Any] = {"model": "m", "messages": [user("write")]}
        many = await chat.chat.completions.create(n=8, max_tokens=300, **options)
        stopped = await chat.chat.completions.create(max_tokens=300, stop=["e"], **options)
        return many, stopped

    asked = ask(served, talk)
    many, stopped = asked.result
    end = served.tokenizer.eos_token_id
    ends = sorted("stop" if one.token_ids[-1] == end else "length" for one in asked.seen[:8])
    assert sorted(choice.finish_reason for choice in many.choices) == ends
    assert set(ends) == {"stop", "length"}
    assert all(len(one.token_ids) == 300 for one in asked.seen[:8] if one.token_ids[-1] != end)
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
