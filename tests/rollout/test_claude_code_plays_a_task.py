"""Claude Code, unmodified, as a command-line agent: confined, its model behind the gateway.

Run with `npm install --ignore-scripts @anthropic-ai/claude-code` in some folder, and CLAUDE_CODE set to the folder
node_modules/@anthropic-ai/claude-code-linux-x64 in it.
"""

import json
import os

import pytest
from gateway_harness import build_tokenizer, trained_text
from small_swe import all_tasks, writing
from test_agents_play_small_tasks import ScriptedModel, play

from tree_rl.rollout.agents.command_line import CommandLineAgent, CommandLineOptions
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.sandbox.confinement import Limits
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.transcript import rows_of_calls

FOLDER = os.environ.get("CLAUDE_CODE", "")
TASK = all_tasks()["lru_cache"]
OPTIONS = {
    "command": "claude --print --dangerously-skip-permissions --model {model} {prompt}",
    "variables": {
        "PATH": f"{FOLDER}:/usr/bin:/bin",
        "CLAUDE_CONFIG_DIR": "/tmp/claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    "limits": Limits(
        timeout_seconds=120,
        cpu_seconds=120,
        memory_bytes=1 << 47,
        processes=256,
        file_bytes=1 << 30,
        output_bytes=1 << 20,
    ),
}


def bash(command: str) -> str:
    call = {"name": "Bash", "arguments": {"command": command, "description": "next step"}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


TURNS = (bash("ls; head -20 lru.py"), bash(writing(dict(TASK.solution_files))), "The cache is repaired.")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="CLAUDE_CODE names no installation of Claude Code")
def test_it_repairs_a_task_and_its_session_is_one_row() -> None:
    tokenizer = build_tokenizer()

    def script(prompt: str) -> str:
        return TURNS[prompt.count("<|im_start|>assistant") - 1] if '"name": "Bash"' in prompt else "A title"

    (session,) = play(
        ScriptedModel(tokenizer, script),
        [(CommandLineAgent(CommandLineOptions(**OPTIONS)), TASK)],
        environment=lambda: SweEnvironment(SandboxOptions(readable=(FOLDER,))),
        seconds=120,
        max_context_tokens=200_000,
        max_turn_tokens=8000,
    )
    assert session.result == ("completed", 1.0), session.done
    assert session.done.outcome.answer == "The cache is repaired.\n"
    working = [row for row in rows_of_calls(session.record.calls) if "The cache" in trained_text(tokenizer, row)]
    assert [trained_text(tokenizer, row) for row in working] == ["".join(f"{turn}<|im_end|>" for turn in TURNS)]
