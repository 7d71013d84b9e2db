"""Two steps of verl's `main_ppo` on two CPU cores: an estimator of the user, and sessions that branch by replay; the
slow tests run every estimator, and every policy by copy and by replay."""

import json
from collections.abc import Iterable, Mapping
from itertools import cycle, product
from pathlib import Path

import pytest
import toy_qwen

from tree_rl.credit import ESTIMATORS
from tree_rl.rollout.branching.policies import POLICIES
from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap

FIRST = 12
"""First sessions of a step: of four prompts, three each."""
AGENTS = """
import openai
from tree_rl.rollout.environments import Outcome, ToolCall


class Writer:
    async def run(self, messages, *, environment, endpoint):
        talk = [dict(message) for message in messages]
        async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.token) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(model=endpoint.model, messages=talk, max_tokens=6)
                said = answer.choices[0].message.content or ""
                command = f"echo {said.encode().hex()} >> said; wc -lc < said"
                # Every second prompt sees the time, which no replay repeats.
                command += "; date +%s%N" if int(talk[0]["content"][-1]) % 2 else ""
                result = await environment.call(ToolCall(name="shell", arguments={"command": command}))
                talk += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
        credit = {"states": ["start", "one", "two"]}
        return Outcome(answer=said, turns=3, malformed_calls=0, is_complete=True, credit=credit)
"""
CHECK = "test $(( $(cksum < said | cut -d' ' -f1) % 2 )) = 0"
"""About half of all sessions are solved."""
OWN = """
def against_the_group(tree, *, scale=1.0):
    return scale * tree.on_leaves(tree.normalise_leaves(tree.reward_P, by_std=False))
"""


WAYS = [(estimator, *way) for estimator, way in zip(ESTIMATORS, cycle(product(POLICIES, (True, False))), strict=False)]
"""Estimator, policy, whether branches copy the sandbox."""
assert {way[1:] for way in WAYS} == set(product(POLICIES, (True, False))), "slow jobs run every policy both ways"


def branching_job(folder: Path, *, policy: str = "fixed", copies: bool = False) -> list[str]:
    (folder / "writing.py").write_text(AGENTS)
    agent, key = "tree_rl.rollout.agents.in_environment.AgentInEnvironment", "rollout.custom.gateway_agent"
    overrides = toy_qwen.gateway_overrides(folder, toy_qwen.save_model(folder / "model"), agent)
    task = {"check": CHECK}
    toy_qwen.save_prompts(folder / "prompts.parquet", toy_qwen.PROMPTS, task, agent_name="tree_gateway_agent")
    unconfined = json.dumps(why_no_bubblewrap() is not None)
    branching = f"branching={{policy:{policy},copies:{json.dumps(copies)}}}"
    options = ("agent=writing.Writer", "environment=shell", f"sandbox.unconfined={unconfined}")
    key = f"+actor_rollout_ref.{key}"
    return [*overrides, *toy_qwen.under(key, "seed=1", branching), *toy_qwen.under(f"{key}.agent_options", *options)]


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_function_of_ones_own_trains_and_sessions_that_do_not_repeat_are_counted(tmp_path: Path) -> None:
    (tmp_path / "own_credit.py").write_text(OWN)
    own = ["algorithm.adv_estimator=own_credit.against_the_group", "+algorithm.credit.scale=0.5"]
    steps = trained(tmp_path, [*branching_job(tmp_path), *own])
    # Two steps take all eight prompts. A session has three turns, and branches at the second and the third.
    assert total(steps, "tree/branches_per_session") * FIRST == FIRST * 2
    assert total(steps, "rollout/unforked_sessions") == FIRST * 2, "those that saw the time"
    assert total(steps, "rollout/replayed_calls") == FIRST * (1 + 2) + FIRST * 2, "a first difference ends the replay"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("estimator", "policy", "copies"), WAYS)
def test_estimators_and_policies_train(tmp_path: Path, estimator: str, policy: str, copies: bool) -> None:
    job = branching_job(tmp_path, policy=policy, copies=copies)
    steps = trained(tmp_path, [*job, f"algorithm.adv_estimator={estimator}"])
    assert total(steps, "tree/branches_per_session") > 0
    assert (total(steps, "rollout/replayed_calls") > 0) == (not copies)


def total(steps: Iterable[Mapping[str, float]], name: str) -> float:
    return sum(step[name] for step in steps)


def trained(folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of a job's two steps, which move the weights."""
    environment = toy_qwen.job_environment(folder)
    run = toy_qwen.run_main_ppo(folder, overrides, environment=environment, seconds=500)
    steps = toy_qwen.read_metrics(run.stdout)
    assert len(steps) == 2
    for step in steps:
        assert step["critic/advantages/max"] > 0 > step["critic/advantages/min"]
        assert step["actor/grad_norm"] > 0
        reward = 1000 * step["tree/session_score/mean"] * step["tree/sessions"]
        assert step["tree/reward_per_1000_generated_tokens"] == pytest.approx(reward / step["rollout/generated_tokens"])
        assert step["tree/reward_per_1000_trained_tokens"] == pytest.approx(reward / step["tree/unique_tokens"])
    return steps
