"""Prompts of software tasks whose sessions branch: all is real but the model, which draws its turns."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway_harness import serving
from played_tasks import shell_call, task_of
from sandboxes_here import HERE
from small_swe import generator, writing
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions, grow
from tree_rl.rollout.branching.recorded_environment import RecordedEnvironment
from tree_rl.rollout.branching.recording import Fork, NotForked, Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway

COMMANDS = (
    "ls -R && cat *.py",
    "mkdir -p notes/empty && echo seen >> notes/log && wc -l notes/log",
    "ln -sf log notes/link; ls notes",
    "printf 'print(1)\\n' > run.sh && chmod 755 run.sh && stat -c '%a %n' run.sh",
    "python3 -c 'import glob; print(sorted(glob.glob(\"**\", recursive=True)))'",
    "rm -f run.sh; false",
)
"""What the model does besides repairing, breaking and ending. Their output tells the state of the files."""


class DrawingModel:
    """Draws a turn from the seed of the call; a turn may be asked for from any of its tokens on."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_turns: int = 5, ends: float = 0.2) -> None:
        self.tokenizer, self.max_turns, self.ends = tokenizer, max_turns, ends
        self.generated = 0
        self.prompts: list[tuple[int, ...]] = []

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        self.prompts.append(tuple(prompt_ids))
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
        if turn >= self.max_turns - 1 or (turn and rng.random() < self.ends):
            return thought + "done"
        if rng.random() < 0.35:
            return thought + shell_call(writing(dict(task_of(prompt).solution_files)))
        return thought + shell_call(rng.choice(COMMANDS))


class Replayed(SweEnvironment):
    """Has a `call` of its own, so its files say not all."""

    async def call(self, call: Any) -> str:
        return await super().call(call)


class Restless(Replayed):
    """Answers otherwise each time."""

    async def call(self, call: Any) -> str:
        return f"{await super().call(call)}\n{random.SystemRandom().random()}"


class Dated(ReActAgent):
    """Writes something else into each session's first message."""

    async def run(self, messages: Sequence[Mapping[str, Any]], **others: Any) -> Any:
        text = f"{messages[-1]['content']} {random.SystemRandom().random()}"
        return await super().run([*messages[:-1], {**messages[-1], "content": text}], **others)


@dataclass(kw_only=True)
class Tree:
    """A prompt's sessions and what the model generated for them."""

    first: list[Recording]
    branches: list[Recording]
    generated: int

    @property
    def finished(self) -> list[Recording]:
        return [one for one in (*self.first, *self.branches) if one.fault is None]


async def play(
    gateway: Gateway,
    recording: Recording,
    task: SweTask,
    *,
    seed: int,
    environment: Callable[..., Any] = SweEnvironment,
    agent: ReActAgent | None = None,
) -> None:
    """One session, as verl's agent loop plays it."""
    resumption = None if recording.fork is None else recording.fork.resumption()
    session = gateway.open_session(sampling={"seed": seed}, resumption=resumption)
    done = await run_task(
        agent=agent or ReActAgent(ReActOptions(max_turns=8)),
        environment=RecordedEnvironment(environment(HERE), recording),
        endpoint=gateway.endpoint(session),
        task={"swe": task.to_row()},
        messages=generator().to_row(task, 0, "train")["prompt"],
        timeout_seconds=60,
    )
    recording.finish(session.name, (await gateway.close_session(session)).calls, resumption)
    if recording.fault is not None:
        raise NotForked(recording.fault)
    assert done.status == "completed" and done.reward is not None, done
    recording.reward = done.reward


def serve(model: DrawingModel, **options: Any) -> Any:
    return serving(model, model.tokenizer, **{"max_context_tokens": 20_000, "max_turn_tokens": 4000, **options})


async def play_tree(
    model: DrawingModel,
    task: SweTask,
    options: BranchOptions,
    *,
    count: int = 2,
    seed: int = 0,
    environment: Callable[..., Any] = SweEnvironment,
) -> Tree:
    """A prompt's first sessions, and their branches."""
    async with serve(model) as gateway:
        first = [Recording(number=number, copies=options.copies) for number in range(count)]

        async def run(recording: Recording) -> None:
            await play(gateway, recording, task, seed=1000 * seed + recording.number, environment=environment)

        await asyncio.gather(*map(run, first))
        branches: list[Recording] = []
        await grow(
            first,
            run,
            options,
            branches=branches,
            number=count,
            rng=random.Random(seed),
            vocabulary=len(model.tokenizer),
        )
        for one in (*first, *branches):
            await one.close()
        return Tree(first=first, branches=branches, generated=model.generated)


async def fork_both_ways(gateway: Gateway, parent: Recording, task: SweTask, token: int, seed: int) -> list[Recording]:
    """A branch from a copy of the files, and the same by repeated calls, with the same seed."""
    made = []
    for copies in (True, False):
        source = parent if copies else replace(parent, tool_calls=[replace(t, saved=None) for t in parent.tool_calls])
        branch = Recording(number=1, fork=Fork(parent=source, token=token), copies=False)
        await play(gateway, branch, task, seed=seed)
        made.append(branch)
    return made


def texts(recording: Recording) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]]:
    """What the calls of a session were asked and answered, and the log-probs."""
    return [(call.prompt_ids, call.response_ids, call.log_probs) for call in recording.calls]
