"""A model that lets harnesses walk: small steps through their shell, sub-agents on the way, summaries when asked.

It reads all it knows in the prompt, so it can serve any number of agents at once. Each turn carries a mark of its own.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness_clients import SHELLS
from scripted_model import Dialect, log_probs_of, misspelt

from tree_rl.rollout.gateway.backend import Generation

TARGET = re.compile(r"[Ww]alk to step (\d+)")
SUMMARY = re.compile(
    r"summary of (?:the|our|this) conversation|continuing our conversation|state_snapshot|anchored summary"
)
"""How harnesses ask for a summary."""
SUMMARY_CHARACTERS = 8_000
"""Of a prompt's end, in which they do."""
WALKER = re.compile(r"You are walker ([a-z_]+(?:\.\d+)?)!")
SUB_STEPS = 5
STARTS_AT = 3
"""Step at which a harness with sub-agents starts two of them in one turn."""


SUB_AGENTS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "claude_code": ("Agent", "prompt", {"subagent_type": "general-purpose", "description": "a part"}),
    "codex": ("multi_agent_v1__spawn_agent", "message", {}),
    "opencode": ("task", "prompt", {"subagent_type": "general", "description": "a part"}),
}
"""Harness -> its tool for sub-agents, the argument with their task, further arguments."""
WAIT, AGENT_ID = "multi_agent_v1__wait_agent", re.compile(r"agent_id\W+([0-9a-f-]{36})")
"""Codex's sub-agents run beside it; one call waits for one of them."""


def task_of(walker: str, steps: int) -> str:
    """What a harness is told."""
    return f"You are walker {walker}! Walk to step {steps}."


@dataclass(kw_only=True, slots=True)
class WalkingModel:
    """Reads in each prompt who asks, how far it is and how far it should go, and takes the next step."""

    dialect: Dialect
    repair: str = ""
    """Shell command of the last step."""
    noise: int = 0
    """Lines of 100 characters that each step prints besides."""
    starts_agents: bool = True
    ledger: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = field(default_factory=Counter)
    written: int = 0

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Take a step."""
        prompt = self.dialect.tokenizer.decode(list(prompt_ids))
        self.written += 1
        text = self.turn(prompt, f"mark-{self.written:06d}")
        ids = tuple(misspelt(self.dialect.tokenizer, text, seed=self.written))[:max_tokens]
        log_probs = log_probs_of(prompt_ids, ids)
        self.ledger[tuple(prompt_ids), ids, log_probs] += 1
        return Generation(token_ids=ids, log_probs=log_probs, finish_reason="stop")

    def turn(self, prompt: str, mark: str) -> str:
        """What the walker of a prompt says next; a title to anybody else."""
        found = WALKER.search(prompt)
        if found is None:
            return self.dialect.writes(f"A title {mark}")
        walker = found[1]
        agent = walker.split(".")[0]
        done = max((int(step) for step in re.findall(rf"step-{re.escape(walker)}-(\d+)\b", prompt)), default=0)
        is_sub = "." in walker
        steps = SUB_STEPS if is_sub else max(map(int, TARGET.findall(prompt)))
        if SUMMARY.search(prompt[-SUMMARY_CHARACTERS:]):
            said = f"You are walker {walker}! Walk to step {steps}. step-{walker}-{done} is behind us. {mark}"
            return self.dialect.writes(f"<summary>\n{said}\n</summary>")
        if agent == "mini_swe":
            return self._mini_turn(walker, done + 1, steps, mark)
        shell = SHELLS[agent]
        if f'"{shell.name}"' not in prompt:
            return self.dialect.writes(f"A title {mark}")
        if done >= steps:
            return self.dialect.writes(f"All steps are taken. {mark}")
        starts = self.starts_agents and not is_sub and done == STARTS_AT and agent in SUB_AGENTS
        if starts and f"step-{agent}-{done}-sub" not in prompt:
            return self._starts(agent, done, mark)
        ids = list(dict.fromkeys(AGENT_ID.findall(prompt))) if agent == "codex" and not is_sub else []
        waited = len(set(re.findall(r"waited for (\d)", prompt)))
        if waited < len(ids):
            wait = {"targets": [ids[waited]], "timeout_ms": 60_000}
            return self.dialect.writes(f"waited for {waited} {mark}", (WAIT, wait))
        return self.dialect.writes("", shell.call(self._command(walker, done + 1, steps, mark)))

    def _starts(self, agent: str, done: int, mark: str) -> str:
        """One turn with two calls: both sub-agents run at once."""
        name, argument, more = SUB_AGENTS[agent]
        end = self.dialect.call_end
        calls: list[str] = []
        for number in (1, 2):
            told = f"You are walker {agent}.{number}! Take steps, then answer. step-{agent}-{done}-sub {mark}"
            call = {**more, argument: told}
            text = self.dialect.writes("", (name, call)).removesuffix(end).rstrip("\n")
            # The turn's thought comes once.
            calls.append(text[text.index("<tool_call>") :] if calls else text)
        return "\n".join(calls) + end

    def _command(self, walker: str, step: int, steps: int, mark: str) -> str:
        command = f"echo step-{walker}-{step} {mark}"
        if self.noise:
            command = f"seq -f 'line %094g' 1 {self.noise}; {command}"
        return f"{self.repair}\n{command}" if step == steps and "." not in walker else command

    def _mini_turn(self, walker: str, step: int, steps: int, mark: str) -> str:
        command = self._command(walker, step, steps, mark)
        if step > steps:
            command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return self.dialect.writes(f"THOUGHT: {mark}.\n\n```mswea_bash_command\n{command}\n```")
