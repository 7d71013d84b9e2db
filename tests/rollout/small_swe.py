"""The small software tasks, for tests that act on them."""

import asyncio
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

from tree_rl.rollout.environments import Outcome
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_reports import TestReport
from tree_rl.rollout.environments.swe_task import SweTask

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


def score_after(task: SweTask, command: str) -> tuple[float, TestReport]:
    """Reward and report after one command of an agent."""

    async def run() -> tuple[float, TestReport]:
        environment = SweEnvironment()
        try:
            await environment.reset({"swe": task.to_row()})
            await environment.run(command)
            reward = await environment.score(OUTCOME)
        finally:
            await environment.close()
        assert environment.report is not None
        return reward, environment.report

    return asyncio.run(run())


def writing(files: dict[str, str]) -> str:
    """A shell command that writes files, as an agent would."""
    return "\n".join(f"cat > {path} <<'END-OF-FILE'\n{text}\nEND-OF-FILE" for path, text in files.items())
