"""verl's stock `main_ppo` on two CPU cores, its rollouts made by command-line agents that know two variables."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "verl_plugin"))
import toy_qwen

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND = """
import sys, time

number = int(sys.argv[1])
if number == 2:
    sys.exit("this agent breaks")
if number == 4:
    time.sleep(3600)
question = [{"role": "user", "content": sys.argv[2]}]
if number % 2:
    import openai

    client = openai.OpenAI()
    said = client.chat.completions.create(model="m", messages=question, max_tokens=8).choices[0].message.content
    more = [*question, {"role": "assistant", "content": said}, {"role": "user", "content": "so"}]
    said = client.chat.completions.create(model="m", messages=more, max_tokens=8, n=2).choices[0].message.content
else:
    import anthropic

    client = anthropic.Anthropic()
    with client.messages.stream(model="m", messages=question, max_tokens=8) as stream:
        # A random model may write </think>, and then a block of thinking comes first.
        said = "".join(block.text for block in stream.get_final_message().content if block.type == "text")
print(len(said) % 2)
"""
AGENT = """
import asyncio, os, sys
from tree_rl.rollout.gateway.agent_protocol import AgentResult


class CommandAgent:
    started = 0

    async def run(self, endpoint, *, messages, task):
        CommandAgent.started += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable, os.environ["AGENT_COMMAND"], str(CommandAgent.started), messages[-1]["content"],
            env={**os.environ, **endpoint.environment()},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(err.decode())
        return AgentResult(reward=float(out))
"""


def test_main_ppo_trains_on_what_command_line_agents_did(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "toy_agent.py").write_text(AGENT)
    overrides = [
        *toy_qwen.gateway_overrides(tmp_path, toy_qwen.save_model(tmp_path / "model"), "toy_agent.CommandAgent"),
        "+actor_rollout_ref.rollout.custom.gateway_agent.session_timeout_s=100",
    ]
    environment = toy_qwen.job_environment(tmp_path, AGENT_COMMAND=str(tmp_path / "command.py"))
    finished = toy_qwen.run_main_ppo(tmp_path, overrides, environment=environment, seconds=800)
    log = finished.stdout + finished.stderr
    assert "this agent breaks" in log and "session_timeout_s=100" in log
    differences = [float(value) for value in re.findall(r"training/rollout_probs_diff_max:([0-9.e+-]+)", log)]
    assert len(differences) == 2 and max(differences) < 1e-5

    dumped = "".join(path.read_text() for path in (tmp_path / "trees").glob("train-*.jsonl"))
    rows = [json.loads(line) for line in dumped.splitlines()]
    sessions = {(row["step"], row["uid"], row["session"]) for row in rows}
    # The broken and the hung session are missing, their siblings are not.
    assert len(sessions) == 2 * 4 * 3 - 2, log[-6000:]
    assert len(rows) > len(sessions)
    assert all(sum(row["response_mask"]) > 0 and row["reward"] in (0.0, 1.0) for row in rows)
