"""The small software tasks, for tests that act on them."""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from sandboxes_here import HERE

from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.task_agent import TaskAgent
from tree_rl.rollout.environments import Outcome, cases
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_reports import TestReport
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.endpoint import Endpoint
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
    return await run_task(
        agent=agent,
        environment=environment,
        endpoint=endpoint,
        task={"swe": task.to_row()},
        messages=generator().to_row(task, 0, "train")["prompt"],
        timeout_seconds=seconds,
    )


def writing(files: dict[str, str]) -> str:
    """A shell command that writes files, as an agent would."""
    return "\n".join(f"cat > {path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE" for path, text in files.items())


def passed_with(folder: Path, task: SweTask, files: Mapping[str, str], *, seconds: float = 20.0) -> set[str]:
    """Names of the cases that pass with these files over the task's, in a plain child process; none after the time."""
    write_files(folder / "files", {**task.files, **files})
    programs, key = cases.programs_for_child(task.cases)
    (folder / "programs.json").write_text(programs, encoding="utf-8")
    runner = Path(cases.__file__).with_name(cases.RUNNER_NAME)
    # -S: without the environment's packages Python starts in a third of the time.
    command = [sys.executable, "-I", "-B", "-S", runner, folder / "programs.json"]
    try:
        done = subprocess.run(command, cwd=folder / "files", stdout=subprocess.PIPE, timeout=seconds)
    except subprocess.TimeoutExpired:
        return set()
    return cases.passed_cases(task.cases, key, done.stdout.decode("utf-8", errors="replace"))


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
