"""Two steps of verl's `main_ppo` on two CPU cores: estimators, and policies by which sessions branch.

Each policy starts branches by copy and by replay, each time with another estimator. The runs of this job follow one
another, so processes start once.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import toy_qwen

from tree_rl.credit import ESTIMATORS
from tree_rl.inspection.files.run_log import read_steps
from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap

UNCONFINED = why_no_bubblewrap() is not None
"""Without bubblewrap there are no copies, so all branches replay."""
FIRST = 12
"""First sessions of a step: of four prompts, three each."""
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "turns": {"options": {"expansions": 1}},
    "entropy": {},
    "tail": {"rounds": 3},
    "fixed": {},
}
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
                command = f"echo {said.encode().hex()} >> said; wc -lc < said" + self.more(talk[0]["content"])
                result = await environment.call(ToolCall(name="shell", arguments={"command": command}))
                talk += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]
        credit = {"states": ["start", "one", "two"]}
        return Outcome(answer=said, turns=3, malformed_calls=0, is_complete=True, credit=credit)

    def more(self, prompt):
        return ""


class Dating(Writer):
    def more(self, prompt):
        return "; date +%s%N" if int(prompt[-1]) % 2 else ""
"""
CHECK = "test $(( $(cksum < said | cut -d' ' -f1) % 2 )) = 0"
"""About half of all sessions are solved."""
OWN = """
def against_the_group(tree, *, scale=1.0):
    return scale * tree.on_leaves(tree.normalise_leaves(tree.reward_P, by_std=False))
"""


def branching_job(folder: Path) -> list[str]:
    (folder / "writing.py").write_text(AGENTS)
    agent, key = "tree_rl.rollout.agents.in_environment.AgentInEnvironment", "rollout.custom.gateway_agent"
    overrides = toy_qwen.gateway_overrides(folder, toy_qwen.save_model(folder / "model"), agent)
    task = {"check": CHECK}
    toy_qwen.save_prompts(folder / "prompts.parquet", toy_qwen.PROMPTS, task, agent_name="tree_gateway_agent")
    return [
        *overrides,
        f"+actor_rollout_ref.{key}.seed=1",
        f"+actor_rollout_ref.{key}.agent_options.agent=writing.Writer",
        f"+actor_rollout_ref.{key}.agent_options.environment=shell",
        f"+actor_rollout_ref.{key}.agent_options.sandbox.unconfined={json.dumps(UNCONFINED)}",
    ]


def branching(policy: str, *, copies: bool) -> str:
    block = json.dumps({"policy": policy, "copies": copies, **POLICIES[policy]}).replace('"', "")
    return f"+actor_rollout_ref.rollout.custom.gateway_agent.branching={block}"


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_function_of_ones_own_trains_and_sessions_that_do_not_repeat_are_counted(tmp_path: Path) -> None:
    (tmp_path / "own_credit.py").write_text(OWN)
    overrides = [
        *branching_job(tmp_path),
        branching("fixed", copies=False),
        "actor_rollout_ref.rollout.custom.gateway_agent.agent_options.agent=writing.Dating",
        "algorithm.adv_estimator=own_credit.against_the_group",
        "+algorithm.credit.scale=0.5",
    ]
    environment = toy_qwen.job_environment(tmp_path)
    steps = toy_qwen.read_metrics(
        toy_qwen.run_main_ppo(tmp_path, overrides, environment=environment, seconds=500).stdout
    )
    assert len(steps) == 2
    for step in steps:
        assert step["critic/advantages/max"] > 0 > step["critic/advantages/min"]
        assert step["actor/grad_norm"] > 0
        check_rates(step)
    # Two steps take all eight prompts. A session has three turns, and branches at the second and the third.
    assert total(steps, "tree/branches_per_session") * FIRST == FIRST * 2
    assert total(steps, "rollout/unforked_sessions") == FIRST * 2, "those that saw the time"
    assert total(steps, "rollout/replayed_calls") == FIRST * (1 + 2) + FIRST * 2, "a first difference ends the replay"


def total(steps: Iterable[Mapping[str, float]], name: str) -> float:
    return sum(step[name] for step in steps)


def check_rates(step: Mapping[str, float]) -> None:
    reward = 1000 * step["tree/session_score/mean"] * step["tree/sessions"]
    assert step["tree/reward_per_1000_generated_tokens"] == pytest.approx(reward / step["rollout/generated_tokens"])
    assert step["tree/reward_per_1000_trained_tokens"] == pytest.approx(reward / step["tree/unique_tokens"])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_estimator_and_every_policy_by_copy_and_by_replay(tmp_path: Path) -> None:
    base = [one for one in branching_job(tmp_path) if "tree_dump_dir" not in one and "trainer.logger" not in one]
    ways = [(policy, copies) for policy in POLICIES for copies in (True, False)]
    runs = {estimator: ways[number % len(ways)] for number, estimator in enumerate(ESTIMATORS)}
    listed = []
    for estimator, (policy, copies) in runs.items():
        (tmp_path / estimator).mkdir()
        chosen = [branching(policy, copies=copies), f"algorithm.adv_estimator={estimator}"]
        arguments = [*base, *chosen, "trainer.logger=[console,file]"]
        listed.append({"folder": str(tmp_path / estimator), "arguments": arguments, "made_by": {}})
    (tmp_path / "runs.json").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "learning_seeds_job", str(tmp_path / "runs.json")]
    environment = toy_qwen.job_environment(tmp_path, Path(__file__).parents[2] / "benchmarks")
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1700)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    for estimator, (policy, copies) in runs.items():
        steps = read_steps(tmp_path / estimator / "steps.jsonl")
        assert [number for number, _ in steps] == [1, 2]
        for _, step in steps:
            check_rates(step)
            assert step["actor/grad_norm"] > 0 and step["critic/advantages/max"] > 0 > step["critic/advantages/min"]
            branches = FIRST * step["tree/branches_per_session"]
            assert step["tree/sessions"] == pytest.approx(FIRST + branches)
            assert (
                branches == pytest.approx({"turns": FIRST, "fixed": 2 * FIRST}.get(policy, branches)) and branches > 0
            )
            assert step["rollout/unforked_sessions"] == 0
            repeated = step["rollout/replayed_calls"]
            if copies and not UNCONFINED:
                assert repeated == 0
            else:
                assert repeated == (FIRST * (1 + 2) if policy == "fixed" else repeated) and repeated > 0
