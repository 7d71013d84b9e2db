"""Real SDK clients, the gateway, verl's client and SGLang: what is recorded is what SGLang generated, and trains.

SGLang draws anew in every run: it heeds a seed only with attention kernels of CUDA.
"""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from verl_server import CONTEXT_TOKENS, ask, backend, branching_talk, check_calls, check_rows, hugging_face, user
from vllm_harness import LOG_PROB_TOLERANCE, check_agreement, trained_differences

from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.transcript import rows_of_calls

pytestmark = [pytest.mark.sglang, pytest.mark.ray, pytest.mark.timeout(600)]


def test_calls_and_rows_hold_what_sglang_generated_and_the_tree_engine_agrees(served: SimpleNamespace) -> None:
    """On every trained token; it notices a foreign one."""
    conversation = ask(served, branching_talk)
    check_calls(conversation)
    said = {text for name, text in conversation.result.items() if name != "openai tokens"}
    # What is between thinking tags or the like reaches the agent apart from the text.
    markup = set(served.tokenizer.added_tokens_decoder) - {served.tokenizer.eos_token_id}
    plain = [one.response_ids for one in conversation.seen if markup.isdisjoint(one.response_ids)]
    assert plain and {served.tokenizer.decode(ids).removesuffix("<|im_end|>") for ids in plain} <= said
    check_rows(served, conversation.record)
    check_agreement(served, conversation.record.calls)


def test_log_probs_are_those_at_the_temperature_of_the_draw(served: SimpleNamespace) -> None:
    from gateway_harness import replayed_log_probs

    async def talk(chat: openai.AsyncOpenAI, _: Any) -> None:
        await chat.chat.completions.create(model="m", messages=[user("write")], max_tokens=40)

    (row,) = rows_of_calls(ask(served, talk, sampling={"temperature": 0.6}).record.calls)
    model = hugging_face(served)
    assert max(trained_differences(row, replayed_log_probs(model, row, 0.6))) < LOG_PROB_TOLERANCE
    assert max(trained_differences(row, replayed_log_probs(model, row, 1.0))) > 100 * LOG_PROB_TOLERANCE


def test_turns_end_by_their_end_token_a_limit_or_a_stop_text(served: SimpleNamespace) -> None:
    end = served.tokenizer.eos_token_id

    def asking(sampling: Any, **options: Any) -> tuple[str, list[int]]:
        async def talk(chat: openai.AsyncOpenAI, _: Any) -> Any:
            return (await chat.chat.completions.create(model="m", messages=[user("write")], **options)).choices[0]

        asked = ask(served, talk, sampling=sampling)
        (call,) = asked.record.calls
        return asked.result.finish_reason, list(call.response_ids)

    cause, ids = asking({"logit_bias": {str(end): 8.0}}, max_tokens=300)
    assert cause == "stop" and len(ids) < 300 and ids.index(end) == len(ids) - 1
    cause, ids = asking({"ignore_eos": True}, max_tokens=60)
    assert cause == "length" and len(ids) == 60
    cause, ids = asking({"ignore_eos": True}, max_tokens=300, stop=["e"])
    text, before = (served.tokenizer.decode(some) for some in (ids, ids[:-1]))
    assert cause == "stop" and len(ids) < 300 and "e" in text and "e" not in before


def test_an_answer_that_verl_aborts_is_not_recorded(served: SimpleNamespace) -> None:
    """As the trainer does before it changes the weights while agents are waiting."""
    (replica,) = served.manager.rollout_replicas

    async def talk(chat: openai.AsyncOpenAI, _: Any) -> None:
        answer = partial(chat.chat.completions.create, model="m", messages=[user("a long answer")])
        # Several at once, so that none is done in a second.
        waiting = [asyncio.create_task(answer(max_tokens=400)) for _ in range(12)]
        await asyncio.sleep(0.8)
        await replica.abort_all_requests()
        for task in waiting:
            with pytest.raises(openai.InternalServerError, match="stopped generating") as refused:
                await task
            assert refused.value.status_code == 503
        await replica.resume_generation()
        assert (await answer(max_tokens=5)).usage.completion_tokens == 5

    (call,) = ask(served, talk, sampling={"ignore_eos": True}).record.calls
    assert len(call.response_ids) == 5


def test_what_sglang_refuses_reaches_the_agent_as_its_own_mistake(served: SimpleNamespace) -> None:
    async def talk(chat: openai.AsyncOpenAI, _: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="exceeds the model's maximum context length"):
            await chat.chat.completions.create(model="m", messages=[user("x y " * CONTEXT_TOKENS)], max_tokens=5)
        after = await chat.chat.completions.create(model="m", messages=[user("and now?")], max_tokens=5)
        assert after.usage.completion_tokens == 5

    # The gateway does not know the server's limit here, so the request reaches it.
    asked = ask(served, talk, sampling={"ignore_eos": True}, max_context_tokens=100 * CONTEXT_TOKENS)
    assert asked.record.refused == {400: 1} and len(asked.record.calls) == 1


def test_sampling_parameters_and_the_ends_of_the_context_are_sglangs(served: SimpleNamespace) -> None:
    def generate(prompt: list[int], **sampling: Any) -> Any:
        server = backend(served, served.client)
        return asyncio.run(server.generate(prompt, max_tokens=1, sampling={"logprobs": True, **sampling}, session="s"))

    with pytest.raises(ValueError, match="top_p must be in"):
        generate([5], top_p=-1.0)
    with pytest.raises(BackendError, match="unexpected keyword argument 'nonsense'"):
        generate([5], nonsense=1)
    assert len(generate([5], seed=3).token_ids) == 1
    # verl keeps the context's last place free. The gateway's limit lies one token higher: an empty answer there.
    empty = generate([5] * (CONTEXT_TOKENS - 1))
    assert (empty.token_ids, empty.log_probs, empty.finish_reason) == ((), (), "length")
    assert len(generate([5] * (CONTEXT_TOKENS - 2)).token_ids) == 1
