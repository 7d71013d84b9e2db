"""SGLang as verl starts it, on a CPU, and the settings of that which the tests share."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / folder) for folder in ("rollout", "verl_plugin", "vllm_rollout")]

from vllm_harness import CONTEXT_TOKENS, SAMPLING, VERSION, Witness  # noqa: E402

ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # The packages that force an answer's format are not installed, and the gateway refuses to force one.
    "grammar_backend": "none",
    # A CPU has no memory of an accelerator to give back between rollout and update.
    "enable_memory_saver": False,
    # Otherwise half of the machine's memory becomes cache.
    "max_total_tokens": 20_000,
}
"""rollout.engine_kwargs.sglang: arguments of SGLang's server that verl passes on."""
ROLLOUT_OVERRIDES = (
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    *(f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{key}={value}" for key, value in ENGINE.items()),
)


def start_server(model: Path) -> Any:
    """verl's own manager with one SGLang replica that reads the model from disk; Ray must run."""
    from hydra import compose, initialize_config_module
    from verl.workers.rollout.llm_server import LLMServerManager

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                *ROLLOUT_OVERRIDES,
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.load_format=auto",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n_gpus_per_node=1",
                f"actor_rollout_ref.rollout.max_model_len={CONTEXT_TOKENS}",
                "actor_rollout_ref.rollout.max_num_seqs=16",
            ],
        )

    async def start() -> Any:
        manager = await LLMServerManager.create(config)
        (server,) = manager.server_handles
        await server.set_global_steps.remote(VERSION)
        return manager

    return asyncio.run(start())


def environment() -> Mapping[str, str]:
    """What every process of a run with SGLang on a CPU needs."""
    return {
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }


def ask(
    served: SimpleNamespace, talk: Any, *, sampling: Mapping[str, Any] | None = None, **options: Any
) -> SimpleNamespace:
    """Run `talk(openai client, anthropic client)` against a gateway in front of SGLang, as one session.

    Args:
        served: the fixture.
        talk: a coroutine function.
        sampling: the trainer's sampling parameters beside the usual ones.
        options: of the gateway.
    """
    from gateway_harness import serving

    async def run() -> SimpleNamespace:
        witness = Witness(client=served.client)
        server = backend(served, witness)
        async with serving(server, served.tokenizer, **{"max_context_tokens": CONTEXT_TOKENS, **options}) as gateway:
            session = gateway.open_session(sampling={**SAMPLING, **(sampling or {})})
            endpoint = gateway.endpoint(session)
            async with (
                openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat,
                anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as messages,
            ):
                result = await talk(chat, messages)
            return SimpleNamespace(result=result, record=await gateway.close_session(session), seen=witness.seen)

    return asyncio.run(run())


def backend(served: SimpleNamespace, client: Any) -> Any:
    """The gateway's way to SGLang through a client of verl."""
    from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend

    return VerlBackend(client, end_token_ids=frozenset(served.tokenizer.all_special_ids), server="sglang")
