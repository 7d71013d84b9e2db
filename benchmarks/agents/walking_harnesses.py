"""Harnesses that walk: how each calls its shell and its sub-agents, and one walk of a harness in its sandbox."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swe_tasks"))

from generate import build_tasks
from harness_clients import SHELLS
from walking_model import Walker, task_of

from tree_rl.rollout.agents.agents_by_name import build
from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.protocols.openai_responses.tools import NAMESPACE_MARK

SECONDS = 400
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def _block(command: str) -> str:
    return f"THOUGHT: next step.\n\n```mswea_bash_command\n{command}\n```"


WALKERS: Mapping[str, Walker] = {
    **{name: Walker(tool=shell.name, step=shell.call) for name, shell in SHELLS.items()},
    "mini_swe": Walker(tool="mswea_bash_command", step=_block, last=_block(SUBMIT)),
}


STARTS: Mapping[str, tuple[str, str]] = {
    "claude_code": ("Agent", "general-purpose"),
    "opencode": ("task", "general"),
    "qwen_code": ("agent", "general-purpose"),
}
"""Harness -> the tool that starts a sub-agent, and a kind of sub-agent."""
STARTED = re.compile(r'"agent_id":\s*"([\w-]+)"')
"""What Codex says of a sub-agent that it started."""


def with_sub_agents(name: str, step: int, steps: int) -> dict[str, Walker]:
    """A harness that starts two sub-agents in one turn, each of so many steps, and its sub-agents."""
    mark = f"[step {step} of {name}]"
    tasks = [task_of(f"{name}-{letter}", steps) for letter in "ab"]
    if name == "codex":
        spawn, wait = (f"multi_agent_v1{NAMESPACE_MARK}{call}" for call in ("spawn_agent", "wait_agent"))
        next_step = SHELLS[name].call(f"echo '[step {step + 1} of {name}]'")
        forks = {
            step: lambda prompt: [(spawn, {"message": f"{task} {mark}"}) for task in tasks],
            step + 1: lambda prompt: [(wait, {"targets": STARTED.findall(prompt)}), next_step],
        }
    else:
        tool, kind = STARTS[name]
        calls = [(tool, {"description": mark, "prompt": task, "subagent_type": kind}) for task in tasks]
        forks = {step: lambda prompt: calls}
    walkers = {name: replace(WALKERS[name], forks=forks)}
    return walkers | {f"{name}-{letter}": WALKERS[name] for letter in "ab"}


async def walk(
    name: str, endpoint: Endpoint, steps: int, *, options: Mapping[str, Any] | None = None, readable: Sequence[str] = ()
) -> FinishedTask:
    """A harness walks in a sandbox of its own. Raises `ValueError` if it is not installed."""
    sandbox = {"readable": list(readable)} if readable else {}
    agent, environment = build(name, options or {}, "swe", sandbox)
    return await run_task(
        agent=agent,
        environment=environment,
        endpoint=endpoint,
        task={"swe": build_tasks()[0].to_row()},
        messages=[{"role": "user", "content": task_of(name, steps)}],
        timeout_seconds=SECONDS,
    )
