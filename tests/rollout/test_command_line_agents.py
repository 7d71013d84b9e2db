"""A command-line agent that knows environment variables only: it reaches its model, and nothing else."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import trained_text
from live_processes import running
from played_tasks import ScriptedModel, play, task_of
from sandboxes_here import needs_bubblewrap
from small_swe import all_tasks, writing
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.command_line import CommandLineAgent, CommandLineOptions
from tree_rl.rollout.environments import ShellEnvironment
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.transcript import rows_of_calls

PROGRAM = """
import json, os, subprocess, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": sys.argv[1], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]

messages = [{"role": "user", "content": sys.argv[2]}]
while True:
    answer = ask(messages)
    messages.append(answer)
    if answer["content"].startswith("DONE"):
        print("finished:", answer["content"])
        break
    ran = subprocess.run(answer["content"], shell=True, capture_output=True, text=True)
    messages.append({"role": "user", "content": "output: " + ran.stdout + ran.stderr})
"""
WIDE = Limits(timeout_seconds=60, cpu_seconds=60, memory_bytes=8 << 30, processes=64, output_bytes=1 << 20)


@pytest.fixture
def program(open_folder: Path) -> Path:
    (open_folder / "agent.py").write_text(PROGRAM)
    return open_folder


def agent_of(program: Path, **options: Any) -> CommandLineAgent:
    command = f"python3 {program}/agent.py {{model}} {{prompt}}"
    return CommandLineAgent(CommandLineOptions(**{"command": command, "limits": WIDE, **options}))


@needs_bubblewrap
def test_it_solves_a_task_and_reaches_nothing_but_the_model(
    chatml: PreTrainedTokenizerFast, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "trainers-secret")
    task = all_tasks()["lru_cache"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.1)
        attack = (
            "env; cat /proc/*/environ; ls /home /root; touch /run/model/x; "
            f"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {other.getsockname()[1]}), 1)'"
        )

        def script(prompt: str) -> str:
            turns = prompt.count("<|im_start|>assistant")
            return [writing(dict(task_of(prompt).solution_files)), attack, "DONE repaired"][turns - 1]

        (session,) = play(
            ScriptedModel(chatml, script),
            [(agent_of(program), task)],
            environment=lambda here: SweEnvironment(replace(here, readable=(str(program),))),
        )
        with pytest.raises(TimeoutError):
            other.accept()
    assert session.result == ("completed", 1.0), session.done
    assert session.done.outcome.answer == "finished: DONE repaired\n"
    (row,) = rows_of_calls(session.record.calls)
    assert trained_text(chatml, row).endswith("DONE repaired<|im_end|>")
    seen = chatml.decode(row.token_ids)
    assert "trainers-secret" not in seen and "ConnectionRefusedError" in seen and "cannot touch" in seen
    assert "OPENAI_BASE_URL=http://127.0.0.1:8700/s/" in seen


def test_one_that_crashes_or_hangs_is_scored_and_killed(chatml: PreTrainedTokenizerFast, program: Path) -> None:
    task = all_tasks()["lru_cache"]
    repair = writing(dict(task.solution_files))
    backend = ScriptedModel(chatml, lambda prompt: "DONE")
    crashing = CommandLineAgent(
        CommandLineOptions(command=f"{repair}\necho {{prompt}} >/dev/null; exit 3", limits=WIDE)
    )
    hanging = CommandLineAgent(CommandLineOptions(command="echo {prompt} > /dev/null; sleep 61.83", limits=WIDE))
    (crashed,), (hung,) = play(backend, [(crashing, task)]), play(backend, [(hanging, task)], seconds=3)
    assert crashed.result == ("agent_failed", 1.0) and "status 3" in crashed.done.detail
    assert hung.result == ("timed_out", 0.0)
    assert not running("61.83")


def test_options_are_checked(chatml: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="the place of the task"):
        CommandLineOptions(command="claude --print")

    class Shell(ShellEnvironment):
        async def score(self, outcome: Any) -> float:
            return 0.0

    backend = ScriptedModel(chatml, lambda prompt: "DONE")
    agent = CommandLineAgent(CommandLineOptions(command="echo {prompt}"))
    (session,) = play(backend, [(agent, all_tasks()["lru_cache"])], environment=Shell)
    assert session.result[0] == "agent_failed" and "needs an environment with run_agent" in session.done.detail
