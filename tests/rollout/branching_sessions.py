"""Prompts of software tasks whose sessions branch: all is real but the model, which draws its turns."""

import asyncio
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sandboxes_here import HERE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from copy_and_replay import DrawingModel, build_tasks, play, serving

from tree_rl.rollout.agents.react import ReActAgent
from tree_rl.rollout.branching.grow import BranchOptions, grow
from tree_rl.rollout.branching.recording import Recording
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask


@cache
def tasks() -> tuple[SweTask, ...]:
    return tuple(build_tasks())


def here() -> SweEnvironment:
    """Copies its files where bubblewrap works."""
    return SweEnvironment(HERE)


class Replayed(SweEnvironment):
    """Has a `call` of its own, so its files say not all."""

    async def call(self, call: Any) -> str:
        return await super().call(call)


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


async def play_tree(
    model: DrawingModel,
    task: SweTask,
    options: BranchOptions,
    *,
    count: int = 2,
    seed: int = 0,
    environment: Callable[[], Any] = here,
) -> Tree:
    """A prompt's first sessions, and their branches."""
    async with serving(model) as gateway:
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
