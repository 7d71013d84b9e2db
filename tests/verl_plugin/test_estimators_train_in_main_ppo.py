"""Two steps of verl's `main_ppo` on two CPU cores with an estimator of one's own, on branching sessions.

That tree_rl's estimators run in the trainer, test_trainer_batch.py holds.
"""

from pathlib import Path

import pytest
import toy_qwen

AGENT = """
import openai
from tree_rl.rollout.gateway.agent_protocol import AgentResult


class ForkingAgent:
    async def run(self, endpoint, *, messages, task):
        talk = [dict(message) for message in messages]
        async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as client:
            async def draw(number):
                answer = await client.chat.completions.create(
                    model=endpoint.model, messages=talk, max_tokens=6, n=number
                )
                return [choice.message.content or "" for choice in answer.choices]

            (said,) = await draw(1)
            talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "so"}]
            said = await draw(2)
        # Three calls; both draws of the second turn start from one state, in all sessions of a prompt.
        states = ["start", "so", "so"]
        return AgentResult(reward=float(len(said[0]) % 2), credit={"states": states})
"""
OWN = """
def against_the_group(tree, *, scale=1.0):
    return scale * tree.on_leaves(tree.normalise_leaves(tree.reward_P, by_std=False))
"""


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_function_of_ones_own_trains(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(AGENT)
    (tmp_path / "own_credit.py").write_text(OWN)
    overrides = [
        *toy_qwen.gateway_overrides(tmp_path, toy_qwen.save_model(tmp_path / "model"), "forking.ForkingAgent"),
        "algorithm.adv_estimator=own_credit.against_the_group",
        "+algorithm.credit.scale=0.5",
    ]
    environment = toy_qwen.job_environment(tmp_path)
    steps = toy_qwen.read_metrics(
        toy_qwen.run_main_ppo(tmp_path, overrides, environment=environment, seconds=500).stdout
    )
    assert len(steps) == 2
    for step in steps:
        assert step["tree/paths_per_session/mean"] > 1, "sessions branch"
        assert step["critic/advantages/max"] > 0 > step["critic/advantages/min"]
        assert step["actor/grad_norm"] > 0
