"""A model that walks as many steps as its task asks, and finds its way by what its prompt holds.

So any number of conversations run at once, and a conversation goes on behind a summary. `[walk NAME 41]` in a task asks
for 41 shell commands; the output of each names the step.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripted_model import ScriptedModel, log_probs_of, misspelt

from tree_rl.rollout.gateway.backend import Generation

TASK = re.compile(r"\[walk ([\w-]+) (\d+)\]")
GO_ON = re.compile(r"\[go on to (\d+)\]")
"""Mark in a later question of the same conversation."""
STEP = r"\[step (\d+) of {name}\]"
SUMMARY = re.compile(
    r"create a detailed summary of the conversation|anchored summary|context summarization agent|"
    r"summarizes internal chat|context-aware state summary|CONTEXT CHECKPOINT COMPACTION",
    re.IGNORECASE,
)
"""What harnesses ask for when they compact."""
OPENING = 2000
"""Characters at the start of a prompt that tell what it is for."""
QUESTION, CALL = "<|im_start|>user", "<tool_call>"
"""Marks of the dialect Hermes."""
LINE = "the model reads what a tool returned and then goes on with its work"


Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""
Turn = str | Call
"""Text, or a call of a tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walker:
    """How the model acts for a harness."""

    tool: str
    """Its prompts hold this."""
    step: Callable[[str], Turn]
    """Shell command -> the turn."""
    last: Turn = "All steps are walked."
    """The turn behind the last step."""
    forks: Mapping[int, Callable[[str], Sequence[Call]]] = field(default_factory=dict)
    """Step -> prompt -> calls that are made in its place, in one turn: sub-agents."""
    lines: int = 0
    """Lines of a step's output besides its name."""


def task_of(name: str, steps: int) -> str:
    """The task of an agent."""
    return f"Walk all steps, one shell command each. [walk {name} {steps}]"


@dataclass(kw_only=True, slots=True)
class WalkingModel(ScriptedModel):
    """Plays every agent whose name begins with a key of `walkers`; the longest such key counts."""

    walkers: Mapping[str, Walker]
    tool: str = ""
    turns: Sequence[str] = ()

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Take the next step."""
        prompt = self.dialect.tokenizer.decode(list(prompt_ids))
        self.prompts.append(len(prompt))
        number = len(self.prompts)
        ids = tuple(misspelt(self.dialect.tokenizer, self.turn(prompt), seed=number))[:max_tokens]
        log_probs = log_probs_of(prompt_ids, ids)
        self.ledger[tuple(prompt_ids), ids, log_probs] += 1
        return Generation(token_ids=ids, log_probs=log_probs, finish_reason="stop")

    def turn(self, prompt: str) -> str:
        """The turn behind a prompt, as the dialect writes it."""
        task = TASK.search(prompt)
        if task is None:
            return self.dialect.writes("A title")
        name = task[1]
        steps = max(int(number) for number in (task[2], *GO_ON.findall(prompt)))
        walked = max((int(step) for step in re.findall(STEP.format(name=name), prompt)), default=0)
        if SUMMARY.search(prompt[prompt.rfind(QUESTION) :]) or SUMMARY.search(prompt[:OPENING]):
            return self.dialect.writes(f"<summary>{task[0]} [step {walked} of {name}]</summary>")
        walker = self.walkers[max((key for key in self.walkers if name.startswith(key)), key=len)]
        if walker.tool not in prompt:
            return self.dialect.writes("A title")
        if walked >= steps:
            return self._written(walker.last)
        if fork := walker.forks.get(walked + 1):
            first, *others = [self._written(call) for call in fork(prompt)]
            end = self.dialect.call_end
            return (
                "\n".join([first.removesuffix(end), *(one[one.index(CALL) :].removesuffix(end) for one in others)])
                + end
            )
        return self._written(
            walker.step(f"echo '[step {walked + 1} of {name}]'; yes '{LINE}' | head -n {walker.lines}")
        )

    def _written(self, turn: Turn) -> str:
        return self.dialect.writes(turn) if isinstance(turn, str) else self.dialect.writes("", turn)
