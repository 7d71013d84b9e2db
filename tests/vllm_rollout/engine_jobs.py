"""Jobs of verl whose rollouts a real engine draws: an agent that asks it, runs of the recipe, and what they leave."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from vllm_harness import environment

AGREEMENT = 1e-5
STALE = 1e-2
LARGE_STEPS = (
    "data.max_response_length=192",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
)
"""Steps so large that yesterday's weights would show, the weights after each, and room for what the agent says."""
AGENT = """
import anthropic
import openai

from tree_rl.rollout.gateway.agent_protocol import AgentResult


class AskingAgent:
    async def run(self, endpoint, *, messages, task):
        async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as chat:
            answer = await chat.chat.completions.create(model="m", messages=messages, max_tokens=12)
            said = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "so"}]
            several = await chat.chat.completions.create(model="m", messages=said, max_tokens=10, n=2)
        helper = endpoint.named("helper")
        async with anthropic.AsyncAnthropic(base_url=helper.url, api_key=helper.token) as client:
            async with client.messages.stream(model="m", messages=messages, max_tokens=8) as stream:
                await stream.get_final_message()
        return AgentResult(reward=float(len(several.choices[0].message.content) % 2))
"""


def run(command: list[str], tmp_path: Path, *, fails: bool = False, **more: str) -> str:
    """Run a command, which ends well unless it `fails`; return its log."""
    finished = subprocess.run(
        command,
        env=os.environ | environment(PYTHONPATH=str(tmp_path), **more),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    log = finished.stdout + finished.stderr
    assert (finished.returncode != 0) == fails, log[-8000:]
    return log


def figures(log: str, name: str) -> list[float]:
    """A metric of verl's console logger, step by step."""
    return [float(value) for value in re.findall(rf"\b{name}:(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)", log)]


def trained_probabilities(model: Path, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Probability of every trained token under a model on disk, each row alone."""
    from transformers import Qwen3ForCausalLM

    policy = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        with torch.no_grad():
            scores = torch.softmax(policy(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(scores[-len(row["response_ids"]) :][torch.tensor(row["response_mask"]).bool()])
    return torch.cat(found)
