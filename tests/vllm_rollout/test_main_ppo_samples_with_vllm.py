"""verl's stock `main_ppo` on a CPU with rollouts by vLLM: agents branch, trees train, and vLLM gets the new weights."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_harness import ROLLOUT_OVERRIDES, environment, save_model

from tree_rl.tree.forest import Forest

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]

RECIPE = Path(__file__).parents[2] / "recipes" / "swe_grpo" / "run_qwen3_fsdp2.sh"
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
VOCABULARY = 2048
"""Of the recipe's tiny model."""
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


def run(command: list[str], tmp_path: Path, **more: str) -> str:
    """Run a command; return its log."""
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
    assert finished.returncode == 0, log[-8000:]
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


def test_the_second_step_samples_from_the_policy_that_the_first_step_made(tmp_path: Path) -> None:
    import toy_qwen

    (tmp_path / "asking_agent.py").write_text(AGENT)
    model = save_model(tmp_path / "model", toy_qwen.build_tokenizer())
    overrides = toy_qwen.gateway_overrides(tmp_path, str(model), "asking_agent.AskingAgent")
    overrides += [*ROLLOUT_OVERRIDES, *LARGE_STEPS]
    log = run([sys.executable, "-m", "verl.trainer.main_ppo", *overrides], tmp_path)

    differences = figures(log, "training/rollout_probs_diff_max")
    print("\nlargest difference of probabilities, vLLM against the trainer, by step:", differences)
    assert len(differences) == 2 and max(differences) < AGREEMENT
    assert max(figures(log, "tree/self_check_error")) < 1e-4

    dumped = "".join(path.read_text() for path in (tmp_path / "trees").glob("train-*.jsonl"))
    rows = [json.loads(line) for line in dumped.splitlines()]
    second = [row for row in rows if row["step"] == 2]
    first_policy = trained_probabilities(model, second)
    second_policy = trained_probabilities(next((tmp_path / "out").glob("global_step_1/**/huggingface")), second)
    moved = float((first_policy - second_policy).abs().max())
    print("largest difference of probabilities, first step's policy against the second's:", moved)
    assert moved > STALE, "the first step must move the policy far enough for stale weights to show"

    assert len({(row["step"], row["uid"], row["session"]) for row in rows}) == 2 * 4 * 3
    assert len(rows) >= 3 * 2 * 4 * 3
    for uid in {row["uid"] for row in rows}:
        group = [np.asarray(row["prompt_ids"] + row["response_ids"]) for row in rows if row["uid"] == uid]
        forest = Forest.from_rows(group)
        assert forest.num_unique < 0.7 * forest.num_flat


def test_swe_grpo_trains_on_what_agents_did_with_vllm(tmp_path: Path, open_folder: Path) -> None:
    from transformers import AutoTokenizer

    settings = {
        "PYTHON": sys.executable,
        "ROLLOUT": "vllm",
        "OUTPUT": str(tmp_path / "out"),
        "STEPS": "2",
        "TRAIN_TASKS": "4",
        "TRAIN_BATCH_SIZE": "2",
        "MINI_BATCH_SIZE": "2",
        "ROLLOUT_N": "3",
        "MAX_TURNS": "2",
        "TURN_LENGTH": "48",
        "TMPDIR": str(open_folder),
        "RAY_TMPDIR": "/tmp",
    }
    # The random model repairs nothing: without the entropy bonus its gradient would be zero.
    log = run(["bash", str(RECIPE), "actor_rollout_ref.actor.entropy_coeff=0.01"], tmp_path, **settings)
    assert figures(log, "tree/sessions") == [6, 6]
    assert min(figures(log, "tree/por")) > 0.3, "sessions of a prompt share it"
    assert min(figures(log, "actor/grad_norm")) > 0
    # The model's vocabulary is padded. verl forbids vLLM to draw padding, which the trainer's softmax includes: random
    # weights give it its share of the probability, and every log-prob differs by that.
    share = len(AutoTokenizer.from_pretrained(tmp_path / "out" / "model")) / VOCABULARY
    expected = -math.log(share)
    differences = figures(log, "rollout_corr/log_ppl_diff")
    assert len(differences) == 2 and differences == pytest.approx([expected] * 2, abs=1e-3)
    assert max(figures(log, "training/rollout_probs_diff_max")) < 1e-4
    assert not list(open_folder.glob("tree-rl-*")), "every sandbox is thrown away"
