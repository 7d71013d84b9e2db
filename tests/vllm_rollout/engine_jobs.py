"""Jobs of verl whose rollouts a real engine draws: an agent that asks it, runs of the recipe, and what they leave."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm_harness import environment, save_model

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
    variables = os.environ | environment(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", **more)
    options = {"capture_output": True, "text": True, "timeout": 800, "check": False}
    finished = subprocess.run(command, env=variables, cwd=tmp_path, **options)
    log = finished.stdout + finished.stderr
    causes = "\n".join(line for line in log.splitlines() if re.search(r"\w+Error: ", line))
    assert (finished.returncode != 0) == fails, log[-8000:] + "\n" + causes[-8000:]
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


def check_that_the_second_step_samples_anew(
    tmp_path: Path, overrides: Sequence[str], **variables: str
) -> tuple[str, list[dict[str, Any]]]:
    """Two steps of verl's `main_ppo` whose rollouts have the probabilities of the trainer's weights of their step.

    Returns the log, and the rows.
    """
    import toy_qwen

    (tmp_path / "asking_agent.py").write_text(AGENT)
    model = save_model(tmp_path / "model", toy_qwen.build_tokenizer())
    given = toy_qwen.gateway_overrides(tmp_path, str(model), "asking_agent.AskingAgent")
    log = run([sys.executable, "-m", "verl.trainer.main_ppo", *given, *overrides, *LARGE_STEPS], tmp_path, **variables)
    differences = figures(log, "training/rollout_probs_diff_max")
    print("\nlargest difference of probabilities, rollout against trainer, by step:", differences)
    assert len(differences) == 2 and max(differences) < AGREEMENT
    assert max(figures(log, "tree/self_check_error")) < 1e-4

    dumped = "".join(path.read_text() for path in (tmp_path / "trees").glob("train-*.jsonl"))
    rows = [json.loads(line) for line in dumped.splitlines()]
    assert len({(row["step"], row["uid"], row["session"]) for row in rows}) == 2 * 4 * 3
    second = [row for row in rows if row["step"] == 2]
    after_step = next((tmp_path / "out").glob("global_step_1/**/huggingface"))
    moved = float((trained_probabilities(model, second) - trained_probabilities(after_step, second)).abs().max())
    print("largest difference of probabilities, first step's policy against the second's:", moved)
    assert moved > STALE, "the first step must move the policy far enough for stale weights to show"
    return log, rows
