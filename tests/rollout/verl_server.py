"""A model behind verl's own server and client, whether that is vLLM or SGLang, and how the tests of both ask it."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai

CONTEXT_TOKENS = 700
VERSION = 7
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 11}


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One answer as verl's client got it from its server."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(kw_only=True, slots=True)
class Witness:
    """verl's client, and everything that passed through it."""

    client: Any
    seen: list[Generated] = field(default_factory=list)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        output = await self.client.generate(
            request_id, prompt_ids=list(prompt_ids), sampling_params=dict(sampling_params)
        )
        self.seen.append(
            Generated(
                prompt_ids=tuple(prompt_ids), token_ids=tuple(output.token_ids), log_probs=tuple(output.log_probs)
            )
        )
        return output


def start_server(model: Path, *overrides: str) -> Any:
    """verl's own manager with one replica that reads the model from disk; Ray must run.

    Args:
        model: its folder.
        overrides: of verl's configuration, `rollout.name` among them.
    """
    from hydra import compose, initialize_config_module
    from verl.workers.rollout.llm_server import LLMServerManager

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.load_format=auto",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
                f"actor_rollout_ref.rollout.max_model_len={CONTEXT_TOKENS}",
                "actor_rollout_ref.rollout.max_num_seqs=16",
                *overrides,
            ],
        )

    async def start() -> Any:
        manager = await LLMServerManager.create(config)
        (server,) = manager.server_handles
        await server.set_global_steps.remote(VERSION)
        return manager

    return asyncio.run(start())


@contextmanager
def serve(model: Path, tokenizer: Any, *overrides: str, environment: Mapping[str, str]) -> Iterator[SimpleNamespace]:
    """The model on disk, its tokenizer, and verl's client of the server that serves it, in a Ray of their own.

    Args:
        model: its folder.
        tokenizer: its own.
        overrides: see `start_server`.
        environment: what every process of the server needs.
    """
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


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def backend(served: SimpleNamespace, client: Any) -> Any:
    """The gateway's way to the server through a client of verl."""
    from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend

    ends = frozenset(served.tokenizer.all_special_ids)
    return VerlBackend(client, end_token_ids=ends, server=served.manager.rollout_config.name)


def ask(
    served: SimpleNamespace, talk: Any, *, sampling: Mapping[str, Any] | None = None, **options: Any
) -> SimpleNamespace:
    """Run `talk(openai client, anthropic client)` against a gateway in front of the server, as one session.

    Args:
        served: what `serve` gave.
        talk: a coroutine function.
        sampling: the trainer's sampling parameters beside the usual ones.
        options: of the gateway.
    """
    from gateway_harness import serving

    async def run() -> SimpleNamespace:
        witness = Witness(client=served.client)
        settings = {"max_context_tokens": CONTEXT_TOKENS, **options}
        async with serving(backend(served, witness), served.tokenizer, **settings) as gateway:
            session = gateway.open_session(sampling={**SAMPLING, **(sampling or {})})
            endpoint = gateway.endpoint(session)
            async with (
                openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat,
                anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as messages,
            ):
                result = await talk(chat, messages)
            return SimpleNamespace(result=result, record=await gateway.close_session(session), seen=witness.seen)

    return asyncio.run(run())
