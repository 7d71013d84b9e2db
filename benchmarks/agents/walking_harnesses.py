"""Harnesses that walk: how each calls its shell and its sub-agents, and one walk of a harness in its sandbox."""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swe_tasks"))

from generate import build_tasks
from harness_clients import SHELLS
from heard_requests import HeardRequest
from least_rows import least_rows
from scripted_model import differences, overlap
from walking_model import Walker, WalkingModel, task_of

from tree_rl.rollout.agents import harnesses
from tree_rl.rollout.agents.agents_by_name import AGENTS, build
from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.gateway.calls.agent_names import MAIN
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.protocols.openai_responses.tools import NAMESPACE_MARK
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

SECONDS = 400
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def _block(command: str) -> str:
    return f"THOUGHT: next step.\n\n```mswea_bash_command\n{command}\n```"


WALKERS: Mapping[str, Walker] = {
    **{name: Walker(tool=shell.name, step=shell.call) for name, shell in SHELLS.items()},
    "mini_swe": Walker(tool="mswea_bash_command", step=_block, last=_block(SUBMIT)),
}


STARTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "claude_code": ("Agent", {"subagent_type": "general-purpose"}),
    "opencode": ("task", {"subagent_type": "general"}),
    # In the foreground they walk one after the other.
    "qwen_code": ("agent", {"subagent_type": "general-purpose", "run_in_background": True}),
}
"""Harness -> the tool that starts a sub-agent, and what kind it starts."""
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
        tool, how = STARTS[name]
        calls = [(tool, {"description": mark, "prompt": task, **how}) for task in tasks]
        forks = {step: lambda prompt: calls}
    walkers = {name: replace(WALKERS[name], forks=forks)}
    return walkers | {f"{name}-{letter}": WALKERS[name] for letter in "ab"}


async def walk(
    name: str,
    endpoint: Endpoint,
    steps: int,
    *,
    agent: str = "",
    options: Mapping[str, Any] | None = None,
    readable: Sequence[str] = (),
) -> FinishedTask:
    """A harness walks in a sandbox of its own. Raises `ValueError` if it is not installed.

    Args:
        agent: its class, where it is not the usual one.
    """
    sandbox = {"readable": list(readable)} if readable else {}
    acting, environment = build(agent or name, options or {}, "swe", sandbox)
    return await run_task(
        agent=acting,
        environment=environment,
        endpoint=endpoint,
        task={"swe": build_tasks()[0].to_row()},
        messages=[{"role": "user", "content": task_of(name, steps)}],
        timeout_seconds=SECONDS,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a walk left."""

    calls: int
    side_calls: int
    """Summaries and titles that the gateway told apart."""
    named_calls: int
    """Calls of sub-agents that are recorded under names of their own."""
    least_rows: int
    """Fewest rows by the message lists of the requests."""
    rows: int
    por: float
    """Potential overlap ratio of the rows."""
    differences: int
    """Calls, tokens and log-probs recorded or trained otherwise than generated; see `scripted_model`."""


def measure(model: WalkingModel, record: RecordedSession, heard: Sequence[HeardRequest]) -> Measured:
    """Compare a record with what the model generated and what the clients sent."""
    return Measured(
        calls=len(record.calls),
        side_calls=sum(call.side is not None for call in record.calls),
        named_calls=sum(call.agent != MAIN for call in record.calls),
        least_rows=least_rows(heard),
        rows=len(rows_of_calls(record.calls)),
        por=round(overlap(record.calls), 3),
        differences=differences(model, record),
    )


def version(name: str) -> str:
    """What a harness says of itself."""
    if name == "mini_swe":
        return importlib.metadata.version("mini-swe-agent")
    program = getattr(harnesses, AGENTS[name].rpartition(".")[2]).harness.program
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return next((word for word in said.split() if word[0].isdigit()), "")
