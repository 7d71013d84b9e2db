"""A command-line agent that knows environment variables only: it reaches its model, and nothing else.

It and mini-swe-agent play small software tasks: all is real but the model, which is scripted. The model plays the known
repair, so the reward must be 1.0, and every token that it wrote must train.
"""

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import talking, trained_text
from live_processes import running
from sandboxes_here import HERE, needs_bubblewrap
from small_swe import Played, ScriptedModel, all_tasks, generator, mini_turn, play, task_of, writing
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.command_line import CommandLineAgent, CommandLineOptions
from tree_rl.rollout.agents.in_environment import AgentInEnvironment, SessionLost
from tree_rl.rollout.agents.mini_swe import MiniSweAgent, MiniSweOptions
from tree_rl.rollout.agents.task_agent import AgentError
from tree_rl.rollout.environments import ShellEnvironment
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.sandbox.errors import SandboxError
from tree_rl.rollout.sandbox.model_socket import socket_to
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


@needs_bubblewrap
def test_it_solves_a_task_and_reaches_nothing_but_the_model(
    chatml: PreTrainedTokenizerFast, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "trainers-secret")
    (open_folder / "agent.py").write_text(PROGRAM)
    options = CommandLineOptions(command=f"python3 {open_folder}/agent.py {{model}} {{prompt}}", limits=WIDE)
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
            [(CommandLineAgent(options), task)],
            environment=lambda here: SweEnvironment(replace(here, readable=(str(open_folder),))),
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


def test_one_that_crashes_or_hangs_is_scored_and_killed(chatml: PreTrainedTokenizerFast) -> None:
    task = all_tasks()["lru_cache"]

    def ended(command: str, seconds: float = 60) -> Played:
        agent = CommandLineAgent(CommandLineOptions(command=f"echo {{prompt}} >/dev/null; {command}", limits=WIDE))
        return play(ScriptedModel(chatml, lambda prompt: "DONE"), [(agent, task)], seconds)[0]

    crashed, hung = ended(f"{writing(dict(task.solution_files))}\nexit 3"), ended("sleep 61.83", 3)
    assert crashed.result == ("agent_failed", 1.0) and "status 3" in crashed.done.detail
    assert hung.result == ("timed_out", 0.0)
    assert not running("61.83")


async def test_it_needs_an_environment_that_runs_agents() -> None:
    agent = CommandLineAgent(CommandLineOptions(command="echo {prompt}"))
    with pytest.raises(AgentError, match="needs an environment with run_agent, received ShellEnvironment"):
        await agent.run([], environment=ShellEnvironment(HERE), endpoint=Endpoint(url="", token="", model=""))


FOUR = sorted(all_tasks())[:4]


def repair_for_mini(prompt: str) -> str:
    turns = prompt.count("<|im_start|>assistant")
    commands = ["ls && cat *.py", writing(dict(task_of(prompt).solution_files))]
    return mini_turn([*commands, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"][turns - 1])


def test_mini_swe_agent_solves_tasks_at_once(chatml: PreTrainedTokenizerFast) -> None:
    finished = play(ScriptedModel(chatml, repair_for_mini), [(MiniSweAgent(), all_tasks()[name]) for name in FOUR])
    for name, session in zip(FOUR, finished, strict=True):
        assert session.result == ("completed", 1.0) and not session.done.detail, name
        assert session.done.outcome.turns == len(session.record.calls) == 3
        (row,) = rows_of_calls(session.record.calls)
        written = [chatml.decode(call.response_ids) for call in session.record.calls]
        assert trained_text(chatml, row) == "".join(written)
        assert not session.record.drift.returned
        assert sorted(set(row.response_calls)) == [-1, 0, 1, 2]
    prompts = {session.record.calls[0].prompt_ids[:200] for session in finished}
    assert len(prompts) == 1, "what the prompt says of the machine is the same in every session"


def test_an_answer_that_mini_swe_agent_drops_is_a_branch_of_its_own(chatml: PreTrainedTokenizerFast) -> None:
    def script(prompt: str) -> str:
        return repair_for_mini(prompt) if "Format error" in prompt else "I forgot the block."

    (session,) = play(ScriptedModel(chatml, script), [(MiniSweAgent(), all_tasks()["lru_cache"])])
    assert session.result == ("completed", 1.0) and session.done.outcome.malformed_calls == 1
    dropped, kept = rows_of_calls(session.record.calls)
    assert trained_text(chatml, dropped) == "I forgot the block.<|im_end|>"
    assert "I forgot" not in chatml.decode(kept.token_ids)


def test_mini_swe_agent_stops_at_its_limits(chatml: PreTrainedTokenizerFast) -> None:
    task = all_tasks()["lru_cache"]
    backend = ScriptedModel(chatml, lambda prompt: mini_turn("echo again"))
    (turns,) = play(backend, [(MiniSweAgent(MiniSweOptions(max_turns=2)), task)])
    (calls,) = play(backend, [(MiniSweAgent(), task)], max_calls=3)
    (context,) = play(backend, [(MiniSweAgent(), task)], max_context_tokens=4200)
    assert turns.result == context.result == ("limit", 0.0) and calls.result == ("out_of_calls", 0.0)
    assert (len(turns.record.calls), len(calls.record.calls)) == (2, 3) and len(context.record.calls) > 3
    babble = play(ScriptedModel(chatml, lambda prompt: "no action"), [(MiniSweAgent(), task)])[0]
    assert babble.result == ("agent_failed", 0.0) and "several answers in a row" in babble.done.detail


async def test_the_agent_loops_agent_is_built_from_its_config(chatml: PreTrainedTokenizerFast) -> None:
    task = all_tasks()["lru_cache"]
    messages, row = generator().to_row(task, 0, "train")["prompt"], {"swe": task.to_row()}

    async def run(sent: Mapping[str, Any] = row, **options: Any) -> Any:
        model = ScriptedModel(chatml, repair_for_mini)
        async with talking(model, max_context_tokens=20_000, max_turn_tokens=4000) as talk:
            sandbox = {"unconfined": HERE.unconfined, "limits": {"timeout_seconds": 20}}
            agent = AgentInEnvironment(agent="mini_swe", sandbox=sandbox, **options)
            return await agent.run(talk.endpoint, messages=messages, task=sent)

    result = await run(options={"max_turns": 5})
    assert (result.reward, result.status) == (1.0, "completed")
    assert (result.figures["turns"], result.figures["ended_completed"]) == (3.0, 1.0)
    assert (await run(options={"max_turns": 1})).figures["ended_limit"] == 1.0
    for nothing in ({"nothing": 1}, {"swe": None}):
        with pytest.raises(SessionLost, match="environment_failed: ValueError: extra_info: expected the key 'swe'"):
            await run(nothing)


async def test_the_socket_to_the_model_may_stand_in_a_long_folder(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(5))
        writer.close()

    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, socket_to("127.0.0.1", server.sockets[0].getsockname()[1], folder):
        opened = os.open(folder, os.O_PATH)
        reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{opened}/socket")
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        writer.close()
        os.close(opened)
    assert not list(folder.iterdir())
    with pytest.raises(SandboxError, match="the socket to the model"):
        async with socket_to("127.0.0.1", 9, folder / "absent"):
            pass
