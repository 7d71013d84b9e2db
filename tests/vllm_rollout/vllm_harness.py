"""vLLM as verl starts it, on a CPU, and the settings of that which the tests share."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "rollout"), str(TESTS / "verl_plugin")]

ROLLOUT_OVERRIDES = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    # A CPU has no memory of an accelerator to give back between rollout and update.
    "actor_rollout_ref.rollout.free_cache_engine=false",
    "+actor_rollout_ref.rollout.enable_sleep_mode=false",
)
CONTEXT_TOKENS = 700
VERSION = 7
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "seed": 11}


def save_model(folder: Path, tokenizer: Any, *, experts: int = 0) -> Path:
    """A random Qwen3 that vLLM's attention on a CPU accepts (heads of at least 32), with logits far from uniform.

    Args:
        folder: where it goes.
        tokenizer: goes beside it.
        experts: of every layer, two of which a token visits; 0 makes a dense model.
    """
    torch.manual_seed(0)
    sparse = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
        **(sparse if experts else {}),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One answer as verl's client got it from vLLM."""

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
    """verl's own manager with one vLLM replica that reads the model from disk; Ray must run."""
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
                *overrides,
            ],
        )

    async def start() -> Any:
        manager = await LLMServerManager.create(config)
        (server,) = manager.server_handles
        await server.set_global_steps.remote(VERSION)
        return manager

    return asyncio.run(start())


def environment(**more: str) -> Mapping[str, str]:
    """What every process of a run with vLLM on a CPU needs."""
    return {
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **more,
    }


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(served: SimpleNamespace, talk: Any, **options: Any) -> SimpleNamespace:
    """Run `talk(openai client, anthropic client)` against a gateway in front of vLLM, as one session."""
    from gateway_harness import serving

    from tree_rl.verl_plugin.agent_loops.gateway_backend import VerlBackend

    async def run() -> SimpleNamespace:
        witness = Witness(client=served.client)
        ends = frozenset(served.tokenizer.all_special_ids)
        settings = {"max_context_tokens": CONTEXT_TOKENS, **options}
        async with serving(VerlBackend(witness, end_token_ids=ends), served.tokenizer, **settings) as gateway:
            session = gateway.open_session(sampling=SAMPLING)
            endpoint = gateway.endpoint(session)
            async with (
                openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token, max_retries=0) as chat,
                anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as messages,
            ):
                result = await talk(chat, messages)
            return SimpleNamespace(result=result, record=await gateway.close_session(session), seen=witness.seen)

    return asyncio.run(run())
