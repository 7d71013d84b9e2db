"""The server's coroutines, in this process: joins, aborts, weight versions, errors."""

import asyncio
import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
from embedded_server import build_server, describe

from tree_rl.verl_plugin.embedded_rollout.server import HFServer
from tree_rl.verl_plugin.embedded_rollout.weight_buckets import load, pack


def server_of(word_model: str, **rollout: Any) -> HFServer:
    return build_server(describe(word_model), prompt_length=40, response_length=24, **rollout)


async def test_concurrent_requests_are_decoded_together_and_carry_the_weight_version(word_model: str) -> None:
    server = server_of(word_model)
    await server.finish_weights(3)
    step, running = server.engine.step, []
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    calls = [server.generate([5 + i] * (3 + i), dict(params), request_id=str(i)) for i in range(8)]
    with patch.object(server.engine, "step", lambda: running.append(len(server.engine.running)) or step()):
        outputs = await asyncio.gather(*calls)
    assert max(running) == 8
    for output in outputs:
        assert output.stop_reason == "completed" and output.extra_fields["global_steps"] == 3
        assert 1 <= len(output.token_ids) == len(output.log_probs) <= 24
        assert (output.token_ids[-1] == 1) == (output.extra_fields["finish_reason"] == "stop")


async def test_abort_returns_partial_tokens_and_parks_new_requests_until_resume(word_model: str) -> None:
    server = server_of(word_model)
    params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 24, "logprobs": True}
    running = asyncio.create_task(server.generate([5, 6, 7], dict(params), request_id="a"))
    while not server.engine.running:
        await asyncio.sleep(0.001)
    await server.abort_all_requests()
    aborted = await running
    assert aborted.stop_reason == "aborted" and len(aborted.token_ids) < 24
    parked = asyncio.create_task(server.generate([5, 6, 7], dict(params), request_id="b"))
    await asyncio.sleep(0.05)
    assert not parked.done()
    await server.resume_generation()
    assert len((await parked).token_ids) == 24
    await server.abort_all_requests(reject_request=True)
    assert (await server.generate([5], dict(params), request_id="c")).stop_reason == "aborted"


async def test_images_read_during_an_abort_wait_for_resume(word_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(word_model)
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read_images(*_: Any) -> None:
        is_reading.set()
        may_go_on.wait(60)

    monkeypatch.setattr(server, "_read_images", read_images)
    asked = asyncio.create_task(server.generate([5, 6], {"temperature": 1.0}, request_id="a", image_data=["picture"]))
    await asyncio.to_thread(is_reading.wait, 60)
    abort = asyncio.create_task(server.abort_all_requests())
    await asyncio.sleep(0)
    may_go_on.set()
    await abort
    await asyncio.sleep(0.05)
    assert server.engine.is_idle and not asked.done()
    await server.resume_generation()
    assert (await asyncio.wait_for(asked, 60)).stop_reason == "completed"


def test_weights_of_another_model_are_refused_by_name() -> None:
    model = torch.nn.Linear(3, 2)
    with pytest.raises(KeyError, match=r"'lora.weight'.*lora.merge=True"):
        load(model, next(pack([("lora.weight", torch.zeros(1))], 1)))
    with pytest.raises(ValueError, match=r"expected shape \(2, 3\)"):
        load(model, next(pack([("weight", torch.zeros(3, 2))], 1)))


async def test_an_engine_failure_answers_every_waiting_request(word_model: str) -> None:
    server = server_of(word_model)
    calls = [server.generate([5, 6], {"temperature": 1.0}, request_id=str(i)) for i in range(3)]
    with patch.object(server.engine, "step", side_effect=IndexError("engine broke")):
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)
    assert [str(result) for result in results] == ["engine broke"] * 3
    assert (await server.generate([5, 6], {"temperature": 1.0}, request_id="x")).stop_reason == "completed"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"beam_width": 4}, "beam_width=4: not known"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ["</a>"]}, "stop"),
    ],
)
def test_what_sampling_does_not_implement_is_refused(word_model: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(server_of(word_model).generate([5], params, request_id="a"))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine_kwargs": {"hf": {"threads": 3}}}, "rollout.engine_kwargs.hf.threads: no such option"),
        ({"engine_kwargs": {"hf": {"kv_cache_bytes": 0}}}, "kv_cache_bytes=0"),
        ({"engine_kwargs": {"hf": {"kv_cache_bytes": 10}}}, "kv_cache_bytes=10 holds less than one sequence"),
        ({"data_parallel_size": 2}, "rollout.data_parallel_size=2"),
    ],
)
def test_bad_options_are_refused_by_key(word_model: str, rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server_of(word_model, **rollout)
