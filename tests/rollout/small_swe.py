"""The small software tasks, for tests that act on them, and how an agent plays them whose model is scripted."""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from gateway_harness import serving
from sandboxes_here import HERE
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.task_agent import TaskAgent
from tree_rl.rollout.environments import Outcome, cases
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_reports import TestReport
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.sandbox.sandbox import SandboxOptions

OUTCOME = Outcome(answer="", turns=1, malformed_calls=0, is_complete=True)
GENERATOR = Path(__file__).parents[2] / "recipes" / "swe_tasks" / "generate.py"


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_swe_tasks", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def all_tasks() -> dict[str, SweTask]:
    return {task.instance_id: task for task in generator().build_tasks()}


def score_after(
    task: SweTask, command: str, *, options: SandboxOptions = HERE, wait_seconds: float = 0
) -> tuple[float, TestReport]:
    """Reward and report after one command of an agent, and what it left running for some seconds."""

    async def run() -> tuple[float, TestReport]:
        environment = SweEnvironment(options)
        try:
            await environment.reset({"swe": task.to_row()})
            await environment.run(command)
            await asyncio.sleep(wait_seconds)
            reward = await environment.score(OUTCOME)
        finally:
            await environment.close()
        assert environment.report is not None
        return reward, environment.report

    return asyncio.run(run())


async def work_on(
    task: SweTask, *, agent: TaskAgent, environment: Any, endpoint: Endpoint, seconds: float = 60
) -> FinishedTask:
    """An agent's session on a task, until its reward."""
    messages = generator().to_row(task, 0, "train")["prompt"]
    asked = {"task": {"swe": task.to_row()}, "messages": messages, "timeout_seconds": seconds}
    return await run_task(agent=agent, environment=environment, endpoint=endpoint, **asked)


def writing(files: dict[str, str]) -> str:
    """A shell command that writes files, as an agent would."""
    return "\n".join(f"cat > {path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE" for path, text in files.items())


def passed_cases(folder: Path, files: Mapping[str, str], all_cases: Sequence[cases.Case], seconds: float) -> set[str]:
    """Names of the cases that pass with these files, in a plain child process."""
    write_files(folder / "files", files)
    programs, key = cases.programs_for_child(all_cases)
    (folder / "programs.json").write_text(programs, encoding="utf-8")
    runner = Path(cases.__file__).with_name(cases.RUNNER_NAME)
    # -S: without the environment's packages Python starts in a third of the time.
    command = [sys.executable, "-I", "-B", "-S", runner, folder / "programs.json"]
    done = subprocess.run(command, cwd=folder / "files", stdout=subprocess.PIPE, timeout=seconds)
    return cases.passed_cases(all_cases, key, done.stdout.decode("utf-8", errors="replace"))


def passed_with(folder: Path, task: SweTask, files: Mapping[str, str]) -> set[str]:
    """Names of the cases that pass with these files over the task's; none after some time."""
    try:
        return passed_cases(folder, {**task.files, **files}, task.cases, 20.0)
    except subprocess.TimeoutExpired:
        return set()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


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
