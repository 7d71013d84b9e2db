"""Small software tasks played by an agent whose model is scripted."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_harness import serving
from sandboxes_here import HERE
from small_swe import all_tasks, work_on
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.in_environment import FinishedTask
from tree_rl.rollout.agents.task_agent import TaskAgent
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.sandbox.sandbox import SandboxOptions

Script = Callable[[str], str]


class ScriptedModel:
    """Writes what a script says for a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script) -> None:
        self.tokenizer, self.script = tokenizer, script

    async def generate(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Generation:
        ids = self.tokenizer.encode(self.script(self.tokenizer.decode(list(prompt_ids))), add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id][:max_tokens]
        return Generation(token_ids=tuple(ids), log_probs=(-0.5,) * len(ids), finish_reason="stop")


@dataclass(frozen=True, kw_only=True)
class Played:
    """A task's end and the session's record."""

    done: FinishedTask
    record: RecordedSession

    @property
    def result(self) -> tuple[str, float | None]:
        return self.done.status, self.done.reward


def play(
    backend: Any,
    agents: Sequence[tuple[TaskAgent, SweTask]],
    seconds: float = 60,
    environment: Callable[[SandboxOptions], Any] = SweEnvironment,
    **options: Any,
) -> list[Played]:
    """All agents at the same time behind one gateway."""

    async def play_one(gateway: Gateway, agent: TaskAgent, task: SweTask) -> Played:
        session = gateway.open_session(sampling={"temperature": 1.0})
        endpoint = gateway.endpoint(session)
        done = await work_on(task, agent=agent, environment=environment(HERE), endpoint=endpoint, seconds=seconds)
        return Played(done=done, record=await gateway.close_session(session))

    async def run() -> list[Played]:
        settings = {"max_context_tokens": 20_000, "max_turn_tokens": 4000, **options}
        async with serving(backend, backend.tokenizer, **settings) as gateway:
            return await asyncio.gather(*[play_one(gateway, agent, task) for agent, task in agents])

    return asyncio.run(run())


def mini_turn(command: str) -> str:
    return f"THOUGHT: next step.\n\n```mswea_bash_command\n{command}\n```"


def task_of(prompt: str) -> SweTask:
    (found,) = [task for task in all_tasks().values() if task.problem_statement in prompt]
    return found
