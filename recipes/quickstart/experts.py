"""Experts of very different quality show the task, with the agent that the policy will play with.

The mixture is mediocre on purpose: SFT learns the format and every habit, good and bad; GRPO then finds the good ones.
"""

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickstart.task import REPORT, StockEnvironment, draw_task, first_messages
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.transcript import ModelCall

# What rollout.custom.tree_agent in grpo.yaml means: demonstrations are sessions like the policy's own.
AGENT = ReActOptions(max_turns=4, parallel_tools="branches", think="strip")
GATEWAY = GatewayOptions(max_context_tokens=96 + 320, max_turn_tokens=112, reasoning="inline")
AT_ONCE = 16
"""Sessions at a time."""
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Habit:
    """What an expert does."""

    share: float
    """Part of the demonstrations."""
    reads: int
    """Files it reads, in parallel."""
    reports: int
    """Numbers it writes into the report."""


# A session that reads three files has three parallel branches, each of which trains its first turn: that turn weighs
# three times the share.
HABITS = {
    "careful": Habit(share=0.10, reads=3, reports=3),
    "forgetful": Habit(share=0.15, reads=3, reports=1),
    "hasty": Habit(share=0.30, reads=1, reports=1),
    "quitter": Habit(share=0.45, reads=0, reports=0),
}
Play = tuple[Habit, Mapping[str, Any]]
"""An expert and the task of its session."""
DONE = "Done."
RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def next_turn(habit: Habit, rooms: Sequence[str], context: str) -> str:
    """What an expert says, asked for these rooms, after the text so far."""
    turns = context.split("<|im_start|>assistant\n")
    reads = rooms[: habit.reads]
    if len(turns) == 2:
        return act(f"read {' '.join(reads)}", [f"cat {room}.txt" for room in reads]) if reads else DONE
    results = [result.removeprefix("stock: ") for result in RESPONSE.findall(turns[-2])]
    if f"> {REPORT}" in turns[-2]:
        return DONE
    if len(results) < len(reads):
        return f"stock: {results[0]}"
    found = " ".join(results[: habit.reports])
    return act(f"stock: {found}", [f"echo {found} > {REPORT}"])


def act(reasoning: str, commands: Sequence[str]) -> str:
    """Write a turn that reasons and runs commands, several of them in parallel."""
    calls = [
        f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
        for command in commands
    ]
    return "\n".join(["<think>", reasoning, "</think>", *calls])


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One session of an expert."""

    calls: tuple[ModelCall, ...]
    """As the gateway recorded them."""
    done: FinishedTask
    """How it ended, and its reward."""


class Stage:
    """The gateway's model, played by experts, who have no log-probs."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.plays: dict[str, Play] = {}
        """Play of each session, by its id."""
        self._tokenizer = tokenizer

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Answer as the session's expert."""
        habit, task = self.plays[session]
        said = next_turn(habit, task["rooms"], self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False))
        ids = self._tokenizer.encode(said + self._tokenizer.eos_token, add_special_tokens=False)
        return Generation(token_ids=tuple(ids), log_probs=None, finish_reason="stop")


async def demonstrate(plays: Sequence[Play], tokenizer: PreTrainedTokenizerFast) -> list[Demonstration]:
    """Record one demonstration per play, in order. Raises `RuntimeError` if a session failed."""
    stage, free = Stage(tokenizer), asyncio.Semaphore(AT_ONCE)

    async def demonstration(gateway: Gateway, play: Play) -> Demonstration:
        _, task = play
        async with free:
            session = gateway.open_session()
            stage.plays[session.id] = play
            done = await run_task(
                agent=ReActAgent(AGENT),
                environment=StockEnvironment(),
                endpoint=gateway.endpoint(session),
                task=task,
                messages=first_messages(task),
                timeout_seconds=TIMEOUT_SECONDS,
            )
            record = await gateway.close_session(session)
        if done.status != "completed":
            raise RuntimeError(
                f"demonstration of {task['rooms']}: expected its end, received {done.status}: {done.detail}"
            )
        return Demonstration(calls=record.calls, done=done)

    async with Gateway(tokenizer=tokenizer, backend=stage, options=GATEWAY) as gateway:
        return await asyncio.gather(*[demonstration(gateway, play) for play in plays])


def draw_plays(count: int, *, seed: int) -> list[Play]:
    """Draw tasks, and an expert for each."""
    random_source = random.Random(seed)
    tasks = [draw_task(random_source) for _ in range(count)]
    habits = random_source.choices(list(HABITS.values()), [habit.share for habit in HABITS.values()], k=count)
    return list(zip(habits, tasks, strict=True))
