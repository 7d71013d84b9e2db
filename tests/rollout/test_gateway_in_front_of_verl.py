"""The gateway in front of verl's client and the embedded engine: real decoding, rows as verl receives them."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from embedded_server import Client, build_server, describe
from gateway_harness import assert_confirmed
from omegaconf import OmegaConf
from ray.exceptions import RayError, RayTaskError
from transformers import Qwen3ForCausalLM
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.config import RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from tree_rl.rollout.gateway.agent_protocol import UNREPORTED, AgentResult
from tree_rl.rollout.gateway.backend import BackendError
from tree_rl.rollout.gateway.generation import generate_answer
from tree_rl.rollout.gateway.tokens.drift import DriftReport
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import Row
from tree_rl.verl_plugin.agent_loops.gateway_agent_loop import TreeGatewayAgentLoop
from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend
from tree_rl.verl_plugin.embedded_rollout.hf_options import HFRolloutOptions


class TwoQuestions:
    """Asks twice, and the second question again under another name; asks for nothing in between.

    Its own time-out is no failure of the session.
    """

    def __init__(self, *, fail: str = "") -> None:
        self.fail = fail

    async def run(
        self, endpoint: Any, *, messages: Sequence[Mapping[str, Any]], task: Mapping[str, Any]
    ) -> AgentResult:
        if self.fail == "error":
            raise RuntimeError("agent broke")
        async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as client:
            ask = partial(client.chat.completions.create, model="m")
            answer = await ask(messages=list(messages), max_tokens=6)
            said = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": task["second"]}]
            if self.fail == "hang":
                await asyncio.sleep(3600)
            await ask(messages=said, max_tokens=5)
            with pytest.raises(openai.BadRequestError):
                await ask(messages=[])
            await ask(messages=said, max_tokens=4, extra_headers={"x-agent-name": "helper"})
        return AgentResult(reward=0.25, status="timed_out", figures={"questions": 2.0})


def build_loop(model_path: Path, custom: dict[str, Any]) -> TreeGatewayAgentLoop:
    model = describe(model_path)
    server = build_server(model)
    server.global_steps = 5
    settings = {"name": "hf", "prompt_length": 200, "response_length": 100, "custom": {"gateway_agent": custom}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": settings}, "data": {}})
    configs = {"trainer_config": DictConfigWrap(config=config), "data_config": DictConfigWrap(config.data)}
    client, given = Client(server), {"processor": None, "dataset_cls": None}
    return TreeGatewayAgentLoop(server_manager=client, tokenizer=model.tokenizer, **configs, **given)


SAMPLE = {"raw_prompt": [{"role": "user", "content": "the forest"}], "extra_info": {"second": "and the segments"}}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
AGENT = f"{__name__}.TwoQuestions"


async def test_sessions_become_rows_whose_log_probs_the_model_confirms_and_their_gateway_ends(model_path: Path) -> None:
    side_calls = [{"name": "title", "weight": 0}, {"name": "forest", "weight": 0.5, "user": "the forest"}]
    loop = build_loop(model_path, OmegaConf.create({"agent": AGENT, "gateway": {"side_calls": side_calls}}))
    outputs, *others = await asyncio.gather(*[loop.run(dict(SAMPLING), **SAMPLE) for _ in range(4)])
    assert all(others) and asyncio.all_tasks() == {asyncio.current_task()}
    model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    trained = 0
    for output in outputs:
        tokens = {name: tuple(getattr(output, name)) for name in ("prompt_ids", "response_ids", "response_mask")}
        log_probs, calls = tuple(output.response_logprobs), tuple(output.extra_fields["response_calls"])
        row = Row(**tokens, response_log_probs=log_probs, response_calls=calls)
        assert_confirmed(model, row)
        trained += sum(row.response_mask)
        weights = [
            0.5 if call == 0 else float(mask) for call, mask in zip(row.response_calls, row.response_mask, strict=True)
        ]
        assert output.reward_score == 0.25 and output.extra_fields["response_weights"] == weights
        assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (5, 5)
    fields = outputs[0].extra_fields
    assert (fields["call_turns"], fields["call_agents"]) == ([0, 1, 1], ["main", "main", "helper"])
    assert (fields["call_versions"], fields["call_sides"]) == ([(5, 5)] * 3, ["forest", None, None])
    assert trained >= 10 and len(outputs) >= 2
    info = fields["reward_extra_info"]
    assert 0 < info["prefix_hits"] < info["prefix_queries"], "later calls repeat earlier ones"
    assert (info["calls"], info["questions"], info["failed"], info["branches"]) == (3, 2.0, 0.0, len(outputs))
    assert (info["refused_calls"], info["constrained_calls"]) == (1, 0)
    assert (info["side_forest"], info["side_title"]) == (1.0, 0.0)
    assert DriftReport().figures().keys() <= info.keys()


def test_requests_of_a_session_have_one_id_that_names_its_prompt_and_seeds_of_their_own(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, names, generate = list[tuple[str, Any]](), set[str](), Client.generate

    async def noted(self: Client, request_id: str, **request: Any) -> Any:
        asked.append((request_id, request["sampling_params"].get("seed")))
        return await generate(self, request_id, **request)

    monkeypatch.setattr(Client, "generate", noted)

    def seeds(seed: int | None, session: int = 0, step: int = 1) -> tuple[Any, ...]:
        asked.clear()
        loop = build_loop(model_path, {"agent": AGENT, "seed": seed})
        places = {"global_steps": step, "index": 3, "session_id": session}
        asyncio.run(loop.run(dict(SAMPLING), uid="prompt", **SAMPLE, **places))
        (name,) = {name for name, _ in asked}
        assert name.split("/")[0] == "prompt" and len(asked) == 3
        names.add(name)
        return tuple(given for _, given in asked)

    assert seeds(None) == seeds(None) == (None,) * 3 and len(names) == 2
    first = seeds(5)
    assert first == seeds(5) and None not in first
    assert len({first, seeds(5, session=1), seeds(5, step=2), seeds(6)}) == 4


@pytest.mark.parametrize(("fail", "status"), [("error", "agent broke"), ("hang", "session_timeout_s=1.5")])
def test_a_failed_agent_is_dropped_or_rewarded_as_the_config_says(model_path: Path, fail: str, status: str) -> None:
    options: dict[str, Any] = {"agent": AGENT, "agent_options": {"fail": fail}, "session_timeout_s": 1.5}
    loop = build_loop(model_path, options)
    with pytest.raises((RuntimeError, TimeoutError), match=status):
        asyncio.run(loop.run(dict(SAMPLING), **SAMPLE))
    if fail == "hang":
        kept = build_loop(model_path, {**options, "failed_reward": -1.0})
        filtered = {"enable": True, "metric": "acc"}
        kept.config.algorithm = {"gdpo_reward_keys": ["style", "calls"], "filter_groups": filtered}
        (output,) = asyncio.run(kept.run(dict(SAMPLING), **SAMPLE))
        figures = output.extra_fields["reward_extra_info"]
        assert output.reward_score == -1.0 and figures["failed"] == 1.0
        assert (figures["style"], figures["acc"], figures["calls"]) == (0.0, 0.0, 1)
        assert output.extra_fields["credit"] == UNREPORTED
        assert sum(output.response_mask) == len(output.response_ids)


class Server:
    """verl's client, which answers as a test says and keeps what it was asked."""

    def __init__(self, *answers: TokenOutput | Exception) -> None:
        self.answers, self.asked = list(answers), []

    async def generate(self, request_id: str, *, sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        self.asked.append(sampling_params)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def output(token_ids: list[int], log_probs: list[float] | None, stop_reason: str = "completed") -> TokenOutput:
    return TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason=stop_reason, extra_fields={})


async def generated(server: Server, sampling: Mapping[str, Any] | None = None, name: str = "vllm") -> Any:
    backend = VerlBackend(server, end_token_ids=frozenset({2}), server=name)
    return await backend.generate([1], max_tokens=9, sampling=sampling or {}, session="s")


def raised_at_the_server(cause: Exception) -> Exception:
    """What Ray raises here: an error of both types, whose text is the server's traceback."""
    return RayTaskError("generate", "Traceback: ... prompt too long", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RayError("actor died"), BackendError, "model server: actor died"),
        (raised_at_the_server(ValueError("prompt too long")), ValueError, "^prompt too long$"),
        (raised_at_the_server(KeyError("prompt")), BackendError, "model server: "),
    ],
)
async def test_a_servers_failures_have_a_status_and_its_refusals_stay_value_errors(
    error: Exception, raised: type[Exception], message: str
) -> None:
    with pytest.raises(raised, match=message) as failed:
        await generated(Server(error))
    assert getattr(failed.value, "status", None) == (500 if raised is BackendError else None)


@pytest.mark.parametrize(
    ("stop_reason", "token_ids", "expected"),
    [("completed", [4, 2], "stop"), ("completed", [4], "length"), ("aborted", [4], "abort"), ("length", [4], "length")],
)
async def test_verls_stop_reasons_are_told_apart(stop_reason: str, token_ids: list[int], expected: str) -> None:
    made = await generated(Server(output(token_ids, None, stop_reason)))
    assert made.finish_reason == expected


@pytest.mark.parametrize(
    ("server", "given", "sent"),
    [
        ("vllm", {"seed": 5, "top_k": -1}, {"seed": 5, "top_k": -1}),
        ("sglang", {"seed": 5}, {"sampling_seed": 5}),
        ("sglang", {"json_schema": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ("hf", {"seed": 5}, {"seed": 5}),
    ],
)
async def test_sampling_has_the_names_that_the_server_knows(
    server: str, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    asked = Server(output([2], [0.0]))
    await generated(asked, given, server)
    assert asked.asked == [{**sent, "max_tokens": 9}]


FULL = [11] * 64
"""As many tokens as the gateway asks for in a turn's first slice."""


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        # An abort before a slice's first token leaves the log-probs of earlier slices.
        ([output(FULL, [-1.0] * 64), output([], None, "aborted")], ("abort", 64)),
        # The server's context is full: it would refuse another request.
        ([output(FULL[:3], [-1.0] * 3)], ("length", 3)),
        ([output(FULL, [-1.0] * 64), output(FULL, [-1.0] * 64)], ("length", 128)),
    ],
    ids=["aborted", "full in the first slice", "full in the second"],
)
async def test_a_turn_ends_with_its_last_slice(
    tiny: SimpleNamespace, slices: list[TokenOutput], expected: tuple[str, int]
) -> None:
    backend = VerlBackend(Server(*slices), end_token_ids=frozenset({2}))
    renderer = Renderer(tiny.tokenizer, {})
    made = await generate_answer(backend, renderer, [1], max_tokens=500, stop=["nowhere"], sampling={}, session="s")
    reason, count = expected
    assert (made.finish_reason, made.token_ids, made.log_probs) == (reason, (11,) * count, (-1.0,) * count)


def routes_of(token_ids: Sequence[int]) -> np.ndarray:
    """Two experts of one layer that tell a token and its position."""
    return np.array([[[token, 1000 + place]] for place, token in enumerate(token_ids)])


@pytest.mark.parametrize(("stop", "is_cut"), [("nowhere", False), ("segments", True)])
async def test_an_answer_has_the_experts_of_its_tokens(tiny: SimpleNamespace, stop: str, is_cut: bool) -> None:
    ids = tiny.tokenizer.encode("the forest " * 50 + "has segments " + "and tokens " * 50)[:150]
    slices = [output(part, None) for part in (ids[:64], ids[64:])]
    for one, end in zip(slices, (64, 150), strict=True):
        # Of every token that the model read; the last one was only drawn.
        one.routed_experts = routes_of([1, *ids[:end]][:-1])
    backend, renderer = VerlBackend(Server(*slices), end_token_ids=frozenset()), Renderer(tiny.tokenizer, {})
    made = await generate_answer(backend, renderer, [1], max_tokens=150, stop=[stop], sampling={}, session="s")
    assert (made.stop_text is not None, len(made.token_ids) < 150) == (is_cut, is_cut)
    read = [1, *made.token_ids][:-1]
    assert made.routes is not None and (made.routes[: len(read)] == routes_of(read)).all()


def test_json_cannot_be_forced_on_the_embedded_engine_which_is_told_before_a_job_starts(model_path: Path) -> None:
    server = build_loop(model_path, {"agent": AGENT}).server_manager.server
    with pytest.raises(ValueError, match="hf cannot force JSON; choose json_output=instruct, or "):
        asyncio.run(server.generate([5], {"json_schema": "{}"}, request_id="a"))

    def config(json_output: str) -> RolloutConfig:
        gateway = {"gateway_agent": {"agent": "a.B", "gateway": {"json_output": json_output}}}
        return RolloutConfig(name="hf", tensor_model_parallel_size=1, custom=gateway)

    HFRolloutOptions.from_rollout(config("instruct"))
    with pytest.raises(ValueError, match=r"gateway\.json_output=enforce: rollout\.name=hf cannot force JSON; choose"):
        HFRolloutOptions.from_rollout(config("enforce"))


def test_a_sample_with_an_image_is_refused_instead_of_losing_it(model_path: Path) -> None:
    content = [{"type": "image", "image": "screen.png"}, {"type": "text", "text": "the forest"}]
    sample = {**SAMPLE, "raw_prompt": [{"role": "user", "content": content}]}
    loop = build_loop(model_path, {"agent": AGENT, "failed_reward": 0.0})
    with pytest.raises(ValueError, match="the sample has image content, and agents get a sample's text alone"):
        asyncio.run(loop.run(dict(SAMPLING), **sample))
