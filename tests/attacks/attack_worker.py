"""Plays attacked sessions: real agents, gateway and sandboxes; the model is scripted. One process per user.

Usage: python attack_worker.py AT_ONCE; reads cases as JSON from standard input, writes a line of JSON per session.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from attack_cases import REPAIR, Case
from gateway_harness import CHATML, build_tokenizer, serving
from hacks import Hack, all_hacks
from judged_tasks import UNITTEST, pytest_folder, pytest_task
from protocol_turns import shell
from small_swe import all_tasks, work_on

from tree_rl.rollout.agents.command_line import CommandLineAgent, CommandLineOptions
from tree_rl.rollout.agents.in_environment import FinishedTask
from tree_rl.rollout.agents.mini_swe import SUBMITTED, MiniSweAgent
from tree_rl.rollout.agents.react import ReActAgent
from tree_rl.rollout.agents.task_agent import TaskAgent
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap

LIMITS = Limits(
    timeout_seconds=15, cpu_seconds=5, disk_bytes=64 << 20, memory_bytes=1 << 29, processes=40, output_bytes=1 << 16
)
RESULTS = os.dup(1)
"""Where results go; what libraries print goes to the error output."""
os.dup2(2, 1)


class HostileModel:
    """Writes the turns of each session, in order."""

    def __init__(self) -> None:
        self.tokenizer = build_tokenizer(CHATML)
        self.turns: dict[str, list[str]] = {}

    async def generate(self, prompt_ids: Sequence[int], *, session: str, **_: Any) -> Generation:
        turns = self.turns[session]
        turn = turns.pop(0) if len(turns) > 1 else turns[0]
        # No model's text holds a surrogate; the arguments of a call may, escaped.
        turn = turn.encode("utf-8", "replace").decode()
        ids = [*self.tokenizer.encode(turn, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Generation(token_ids=tuple(ids), log_probs=(-0.5,) * len(ids), finish_reason="stop")


def agent_and_turns(name: str, command: str, limits: Limits) -> tuple[TaskAgent, list[str]]:
    """An agent that plays a command, and what the model writes for it."""
    if name == "command_line":
        # A program of its own choice: the command is the program.
        return CommandLineAgent(CommandLineOptions(command=f"{command}\n: {{prompt}}", limits=limits)), [""]
    if name == "mini_swe":
        turns = [f"THOUGHT: go on.\n\n```mswea_bash_command\n{text}\n```" for text in (command, f"echo {SUBMITTED}")]
        return MiniSweAgent(), turns
    return ReActAgent(), [shell(command), "Done."]


@asynccontextmanager
async def hostile_gateway() -> Any:
    """What plays sessions behind a gateway before a hostile model, with room for its long turns."""
    model = HostileModel()

    async def play(
        agent: str, task: SweTask, command: str, options: SandboxOptions, seconds: float = 40.0
    ) -> tuple[FinishedTask, str]:
        """One session from its first turn to its reward, and what the tests printed."""
        acts, turns = agent_and_turns(agent, command, options.limits)
        session, environment = gateway.open_session(), SweEnvironment(options)
        model.turns[session.id] = turns
        endpoint = gateway.endpoint(session)
        done = await work_on(task, agent=acts, environment=environment, endpoint=endpoint, seconds=seconds)
        await gateway.close_session(session)
        return done, environment.report.output if environment.report else ""

    async with serving(model, model.tokenizer, max_context_tokens=400_000, max_turn_tokens=200_000) as gateway:
        yield play


async def play_all(cases: Sequence[Case], at_once: int) -> None:
    """All cases, on three tasks that we ship, whose tests are data, and one each for unittest and pytest."""
    hacks, room = {**all_hacks(), REPAIR: Hack()}, asyncio.Semaphore(at_once)
    tasks = {**all_tasks(), "unittest": UNITTEST, "pytest": pytest_task()}
    options = SandboxOptions(limits=LIMITS, readable=(pytest_folder(),))
    async with hostile_gateway() as play:

        async def attack(case: Case) -> None:
            command = hacks[case.hack].command(tasks[case.task], repaired=case.hack == REPAIR)
            async with room:
                done, output = await play(case.agent, tasks[case.task], command, options)
            report(case, done.status, done.reward, f"{done.detail} {output}")

        await asyncio.gather(*map(attack, cases))


def report(case: Case, status: str, reward: float | None, detail: str) -> None:
    line = {"case": asdict(case), "status": status, "reward": reward, "detail": detail[-500:]}
    os.write(RESULTS, f"{json.dumps(line)}\n".encode())


def main() -> None:
    cases = [Case(**entry) for entry in json.load(sys.stdin)]
    if reason := why_no_bubblewrap():
        for case in cases:
            report(case, "skipped", None, f"bubblewrap does not work here for user {os.geteuid()}: {reason}")
    else:
        asyncio.run(play_all(cases, int(sys.argv[1])))


if __name__ == "__main__":
    main()
