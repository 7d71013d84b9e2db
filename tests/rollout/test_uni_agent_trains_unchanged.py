"""uni-agent's own framework and gateway write the rows, `tree_sync` trains them: stock `main_ppo`, nothing in between.

Run with UNI_AGENT set to a checkout of verl-project/uni-agent (run with 6f4a7c9). Its chains hold earlier
answers as context where a history was edited, and have fields and tags of their own.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "verl_plugin"))
import toy_qwen

CHECKOUT = os.environ.get("UNI_AGENT", "")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

RUNNER = """
import aiohttp
import openai


async def play(*, raw_prompt, session, sample_index, **_):
    async def ask(messages):
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=6)
        return answer.choices[0].message.content

    async with openai.AsyncOpenAI(base_url=session.base_url, api_key="unused") as client:
        question = list(raw_prompt)
        said = [*question, {"role": "assistant", "content": await ask(question)}, {"role": "user", "content": "so"}]
        last = await ask(said)
        edited = [*question, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "and"}]
        await ask(edited)
    async with aiohttp.ClientSession() as http:
        async with http.post(session.reward_info_url, json={"reward_info": {"reward": len(last) % 2}}) as response:
            response.raise_for_status()
"""


@pytest.mark.skipif(not CHECKOUT, reason="UNI_AGENT names no checkout of uni-agent")
def test_rows_of_uni_agent_train_on_trees(tmp_path: Path) -> None:
    (tmp_path / "toy_runner.py").write_text(RUNNER)
    framework = "+actor_rollout_ref.rollout.custom.agent_framework"
    overrides = [
        *toy_qwen.ppo_overrides(
            toy_qwen.save_model(tmp_path / "model"),
            toy_qwen.save_prompts(tmp_path / "prompts.parquet", [f"say {i}" for i in range(8)]),
            toy_qwen.save_reward(tmp_path / "reward.py"),
            tmp_path / "out",
        ),
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=uni_agent.framework.entry.AgentFrameworkRolloutAdapter",
        f"{framework}.gateway_count=1",
        f"{framework}.log_dir={tmp_path / 'logs'}",
        f"{framework}.agent_runners.toy.runner_fqn=toy_runner.play",
        "trainer.v1.trainer_mode=tree_sync",
        "+ray_kwargs.ray_init.num_gpus=1",
        "trainer.n_gpus_per_node=1",
    ]
    environment = toy_qwen.job_environment(tmp_path, CHECKOUT)
    finished = toy_qwen.run_main_ppo(tmp_path, overrides, environment=environment, seconds=860)
    steps = [metrics for metrics in toy_qwen.read_metrics(finished.stdout) if "tree/sessions" in metrics]
    assert len(steps) == 2, finished.stdout[-6000:]
    for metrics in steps:
        assert metrics["tree/sessions"] == 12
        assert metrics["tree/paths_per_session/mean"] == 2, "an edited history is a chain, and so a row, of its own"
        assert metrics["tree/unique_tokens"] < metrics["tree/flat_tokens"]
        assert metrics["tree/self_check_error"] < 1e-4
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert 0 < metrics["tree/session_score/mean"] < 1 and metrics["actor/grad_norm"] > 0
