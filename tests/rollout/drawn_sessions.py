"""Sessions of software tasks, real but for the model, which draws its turns; and branches of them, made both ways."""

import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "swe_tasks"))
from experts import shell, write_command
from generate import build_tasks, to_row
from transformers import PreTrainedTokenizerBase

from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.recorded_environment import RecordedEnvironment
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.sandbox.sandbox import SandboxOptions

COMMANDS = (
    "ls -R && cat *.py",
    "mkdir -p notes/empty && echo seen >> notes/log && wc -l notes/log",
    "ln -sf log notes/link; ls notes",
    "printf 'print(1)\\n' > run.sh && chmod 755 run.sh && stat -c '%a %n' run.sh",
    "python3 -c 'import glob; print(sorted(glob.glob(\"**\", recursive=True)))'",
    "rm -f run.sh; false",
)
"""What the model does besides repairing and ending. Their output tells the state of the files."""
RESTLESS: Mapping[str, str] = {
    "clock": "date +%s%N",
    "random": "python3 -c 'import random; print(random.random())'",
    "pid": "echo $$",
}
"""Commands whose results differ when they are repeated."""


class DrawingModel:
    """Draws a turn from the seed of the call; a turn may be asked for from any of its tokens on.

    Args:
        tasks: those that sessions work on.
        max_turns: turns of a session.
        ends: chance that a turn after the first is the last.
        first: command of the first turn; None draws it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[SweTask],
        *,
        max_turns: int = 5,
        ends: float = 0.2,
        first: str | None = None,
    ) -> None:
        self.tokenizer, self.tasks, self.max_turns, self.ends, self.first = tokenizer, tasks, max_turns, ends, first
        self.generated = 0

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Write the rest of a turn."""
        prompt = self.tokenizer.decode(list(prompt_ids))
        rng = random.Random(sampling["seed"])
        before, _, started = prompt.rpartition("<|im_start|>assistant\n")
        text = self._turn(prompt, before.count("<|im_start|>assistant"), rng)
        if started:
            # It goes on after what a branch kept: with any words and one call.
            text = f" {rng.randrange(1000)}" + (text if "<tool_call>" not in started else "")
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id][:max_tokens]
        self.generated += len(ids)
        log_probs = tuple(-rng.random() for _ in ids)
        finish = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Generation(token_ids=tuple(ids), log_probs=log_probs, finish_reason=finish)

    def _turn(self, prompt: str, turn: int, rng: random.Random) -> str:
        thought = f"step {rng.randrange(1000)}\n"
        if not turn and self.first is not None:
            return thought + shell(self.first)
        if turn >= self.max_turns - 1 or (turn and rng.random() < self.ends):
            return thought + "done"
        if rng.random() < 0.35:
            (task,) = [task for task in self.tasks if task.problem_statement in prompt]
            return thought + shell(write_command(task.solution_files))
        return thought + shell(rng.choice(COMMANDS))


async def play(
    gateway: Gateway,
    recording: Recording,
    task: SweTask,
    *,
    seed: int,
    environment: Callable[[], Any],
    agent: ReActAgent | None = None,
) -> None:
    """One session, as verl's agent loop plays it; raises `NotForked` for a branch that did not come to its cut."""
    resumption = None if recording.fork is None else recording.fork.resumption()
    session = gateway.open_session(sampling={"seed": seed}, resumption=resumption)
    done = await run_task(
        agent=agent or ReActAgent(ReActOptions(max_turns=8)),
        environment=RecordedEnvironment(environment(), recording),
        endpoint=gateway.endpoint(session),
        task={"swe": task.to_row()},
        messages=to_row(task, 0, "train")["prompt"],
        timeout_seconds=60,
    )
    recording.finish(session.name, (await gateway.close_session(session)).calls, resumption)
    if recording.fault is not None:
        raise NotForked(recording.fault)
    assert done.status == "completed" and done.reward is not None, f"{task.instance_id}: {done}"
    recording.reward = done.reward


@asynccontextmanager
async def serving(model: DrawingModel) -> AsyncIterator[Gateway]:
    """A gateway in front of the model."""
    options = GatewayOptions(max_context_tokens=20_000, max_turn_tokens=4000)
    async with Gateway(tokenizer=model.tokenizer, backend=model, options=options) as gateway:
        yield gateway


def said(recording: Recording) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]]:
    """What the calls of a session were asked and answered, and the log-probs."""
    return [(call.prompt_ids, call.response_ids, call.log_probs) for call in recording.calls]


async def fork_both_ways(
    gateway: Gateway, model: DrawingModel, number: int, *, sandbox: SandboxOptions
) -> dict[str, Any]:
    """One session, and a branch of it from a copy and by repeated calls, with one seed.

    Args:
        gateway: in front of the model.
        number: of the session; even ones are cut at a token within a turn, odd ones at a turn's start.
    """
    task, rng = model.tasks[number % len(model.tasks)], random.Random(f"0 {number}")

    def environment() -> SweEnvironment:
        return SweEnvironment(sandbox)

    parent = Recording(number=0)
    await play(gateway, parent, task, seed=rng.randrange(1 << 30), environment=environment)
    nodes = parent.nodes(len(model.tokenizer)).nodes
    node = rng.choice(nodes[1:])
    fork = Fork(parent=parent, token=node.start if number % 2 else rng.randrange(node.start, node.end))
    without = replace(parent, tool_calls=[replace(call, saved=None) for call in parent.tool_calls])
    row: dict[str, Any] = {"turns": len(parent.calls), "places": len(nodes), "calls_before": len(fork.tool_calls)}
    branch_seed, branches = rng.randrange(1 << 30), {}
    for way, source in (("copy", parent), ("replay", without)):
        branch = Recording(number=1, fork=Fork(parent=source, token=fork.token), copies=False)
        try:
            await play(gateway, branch, task, seed=branch_seed, environment=environment)
            row[f"{way}_reward"], branches[way] = branch.reward, branch
        except NotForked:
            row[f"{way}_fault"] = branch.fault
        row[f"{way}_repeated_calls"] = branch.replayed_calls
    if len(branches) == 2:
        seen = [(said(one), [call.result for call in one.tool_calls]) for one in branches.values()]
        row |= {"same_reward": row["copy_reward"] == row["replay_reward"], "same_tokens": seen[0] == seen[1]}
        row["left_parent"] = said(branches["copy"]) != said(parent)
    await parent.close()
    return row


async def forked(
    tokenizer: PreTrainedTokenizerBase, count: int, *, sandbox: SandboxOptions, restless: str | None = None
) -> list[dict[str, Any]]:
    """What `fork_both_ways` finds in so many sessions, which begin with a command of `RESTLESS` if one is named."""
    model = DrawingModel(tokenizer, build_tasks(), first=None if restless is None else RESTLESS[restless])
    async with serving(model) as gateway:
        return [await fork_both_ways(gateway, model, number, sandbox=sandbox) for number in range(count)]
