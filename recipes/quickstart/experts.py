"""Experts of very different quality who demonstrate the task, in the very sessions that the policy will run.

The mixture is mediocre on purpose: SFT learns the format and every habit, good and bad; GRPO then finds the good ones.
"""

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickstart.task import REPORT, StockEnvironment, draw_task, first_messages

from tree_rl.rollout.chat import Chat, Tokenizer
from tree_rl.rollout.session import SessionOptions, SessionRecord, run_session


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
DONE = "Done."
RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


class Expert:
    """Speaks for the model: token ids in, token ids out.

    Args:
        habit: What it does.
        rooms: Rooms asked for.
        tokenizer: Of the policy.
    """

    def __init__(self, habit: Habit, rooms: Sequence[str], tokenizer: Tokenizer) -> None:
        self._rooms = tuple(rooms[: habit.reads])
        self._reports = habit.reports
        self._tokenizer = tokenizer

    async def __call__(self, prompt_ids: list[int], *, max_tokens: int) -> tuple[list[int], None]:
        """Answer a prompt; an expert has no log-probs."""
        said = self.say(self._tokenizer.decode(prompt_ids, skip_special_tokens=False))
        return self._tokenizer.encode(said + self._tokenizer.eos_token, add_special_tokens=False), None

    def say(self, context: str) -> str:
        """Choose the next turn from the text so far."""
        turns = context.split("<|im_start|>assistant\n")
        if len(turns) == 2:
            return (
                act(f"read {' '.join(self._rooms)}", [f"cat {room}.txt" for room in self._rooms])
                if self._rooms
                else DONE
            )
        results = [result.removeprefix("stock: ") for result in RESPONSE.findall(turns[-2])]
        if f"> {REPORT}" in turns[-2]:
            return DONE
        if len(results) < len(self._rooms):
            return f"stock: {results[0]}"
        found = " ".join(results[: self._reports])
        return act(f"stock: {found}", [f"echo {found} > {REPORT}"])


def act(reasoning: str, commands: Sequence[str]) -> str:
    """Write a turn that reasons and runs commands, several of them in parallel."""
    calls = [
        f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
        for command in commands
    ]
    return "\n".join(["<think>", reasoning, "</think>", *calls])


async def demonstrate(count: int, tokenizer: Tokenizer, options: SessionOptions, *, seed: int) -> list[SessionRecord]:
    """Record demonstrations.

    Args:
        count: Sessions.
        tokenizer: Of the policy.
        options: Those of the policy's own sessions.
        seed: Decides tasks and experts.

    Returns:
        One record per session, with the reward the expert earned.
    """
    random_source = random.Random(seed)
    tasks = [draw_task(random_source) for _ in range(count)]
    habits = random_source.choices(list(HABITS.values()), [habit.share for habit in HABITS.values()], k=count)
    chat = Chat(tokenizer)

    async def session(habit: Habit, task: Mapping[str, Any]) -> SessionRecord:
        return await run_session(
            messages=first_messages(task),
            task=task,
            chat=chat,
            environment=StockEnvironment(),
            generate=Expert(habit, task["rooms"], tokenizer),
            options=options,
        )

    return await asyncio.gather(*[session(habit, task) for habit, task in zip(habits, tasks, strict=True)])
