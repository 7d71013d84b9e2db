"""A model behind verl's own server and client, whether that is vLLM or SGLang, and how the tests of both ask it."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import torch
from gateway_harness import Talk, check_record, serving, user

from tree_rl.rollout.transcript import ModelCall

CONTEXT_TOKENS = 700
VERSION = 7
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 11}


class Witness:
    """verl's client, and every answer that it got from its server."""

    def __init__(self, client: Any) -> None:
        self.client, self.seen = client, list[ModelCall]()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        asked = {"prompt_ids": list(prompt_ids), "sampling_params": dict(sampling_params)}
        output = await self.client.generate(request_id, **asked)
        ids, log_probs = tuple(output.token_ids), tuple(output.log_probs)
        self.seen.append(ModelCall(prompt_ids=tuple(prompt_ids), response_ids=ids, log_probs=log_probs))
        return output


def start_server(model: Path, *overrides: str) -> Any:
    """verl's own manager with one replica of the model on disk. Ray must run, and overrides name the engine."""
    from hydra import compose, initialize_config_module
    from verl.workers.rollout.llm_server import LLMServerManager

    sizes = {"nnodes": 1, "n_gpus_per_node": 1, "max_model_len": CONTEXT_TOKENS, "max_num_seqs": 16}
    given = (f"actor_rollout_ref.rollout.{name}={value}" for name, value in {"load_format": "auto", **sizes}.items())
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"actor_rollout_ref.model.path={model}", *given, *overrides])

    async def start() -> Any:
        manager = await LLMServerManager.create(config)
        (server,) = manager.server_handles
        await server.set_global_steps.remote(VERSION)
        return manager

    return asyncio.run(start())


@contextmanager
def serve(model: Path, tokenizer: Any, *overrides: str, environment: Mapping[str, str]) -> Iterator[SimpleNamespace]:
    """The model on disk, its tokenizer, and verl's client of the server that serves it, in a Ray of their own."""
    import ray

    before = dict(os.environ)
    os.environ.update(environment)
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=True)
    try:
        manager = start_server(model, *overrides)
        yield SimpleNamespace(model=model, tokenizer=tokenizer, client=manager.get_client(), manager=manager)
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def backend(served: SimpleNamespace, client: Any) -> Any:
    """The gateway's way to the server through a client of verl."""
    from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend

    ends = frozenset(served.tokenizer.all_special_ids)
    return VerlBackend(client, end_token_ids=ends, server=served.manager.rollout_config.name)


def ask(
    served: SimpleNamespace, talk: Any, *, sampling: Mapping[str, Any] | None = None, **options: Any
) -> SimpleNamespace:
    """Run `talk(openai client, anthropic client)` as one session; `sampling` is the trainer's beside the usual one."""

    async def run() -> SimpleNamespace:
        witness = Witness(served.client)
        settings = {"max_context_tokens": CONTEXT_TOKENS, **options}
        server = backend(served, witness)
        async with serving(server, served.tokenizer, **settings) as gateway, AsyncExitStack() as left:
            session = Talk(gateway, left, **{**SAMPLING, **(sampling or {})})
            result = await talk(session.openai, session.anthropic)
            await session.close()
        return SimpleNamespace(result=result, record=session.record, seen=witness.seen)

    return asyncio.run(run())


async def branching_talk(chat: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> dict[str, Any]:
    """Five ways to ask, three of which go on from an answer: a session that branches. Returns what was said."""
    options: dict[str, Any] = {"model": "m", "max_tokens": 40}
    opening = [user("every unique token of the forest stands once, and a row reads its own path from root to leaf")]
    whole = (await chat.chat.completions.create(messages=opening, logprobs=True, **options)).choices[0]
    turn = [*opening, whole.message.model_dump()]
    chunks = await chat.chat.completions.create(messages=[*turn, user("and its segments?")], stream=True, **options)
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
    several = await chat.chat.completions.create(messages=opening, n=2, **options)
    back = [*opening, {"role": "assistant", "content": whole.message.content}, user("what does a tool return?")]
    answer = text_of(await messages.messages.create(messages=back, **options))
    back += [{"role": "assistant", "content": answer}, user("go on")]
    async with messages.messages.stream(messages=back, **options) as events:
        final = await events.get_final_message()
    return {
        "openai": whole.message.content or "",
        "openai tokens": [(token.token, token.logprob) for token in whole.logprobs.content],
        "openai stream": streamed,
        **{f"openai n {choice.index}": choice.message.content or "" for choice in several.choices},
        "anthropic": answer,
        "anthropic stream": text_of(final),
    }


def text_of(answer: anthropic.types.Message) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def check_calls(talked: SimpleNamespace) -> None:
    """All six calls are recorded as the server was asked and answered, with the version of its weights."""
    calls = {(call.prompt_ids, call.response_ids, call.log_probs) for call in talked.record.calls}
    assert calls == {(one.prompt_ids, one.response_ids, one.log_probs) for one in talked.seen}
    assert len(calls) == 6
    assert all(call.log_probs is not None and call.response_ids for call in talked.record.calls)
    assert {(call.min_version, call.max_version) for call in talked.record.calls} == {(VERSION, VERSION)}
    log_probs = tuple(log_prob for _, log_prob in talked.result["openai tokens"])
    assert log_probs == talked.seen[0].log_probs


def hugging_face(served: SimpleNamespace) -> Any:
    """The served model, computed by transformers."""
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(served.model, dtype=torch.float32).eval()


def check_rows(served: SimpleNamespace, record: Any) -> None:
    """Rows train what was generated and nothing else, with the log-probs that transformers computes."""
    check_record(SimpleNamespace(model=hugging_face(served)), record)
