"""What a scripted model says to the native agent in a task of two files, turn by turn."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gateway_harness import check_record, serving, trained_text
from sandboxes_here import HERE

from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.environments import ShellEnvironment
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

TASK = {"files": {"a.txt": "alpha\n", "b.txt": "beta\n"}, "check": "grep -q alpha out.txt"}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(command: str) -> str:
    return call("shell", command=command)


def thinking(text: str, *rest: str) -> str:
    return f"<think>\n{text}\n</think>\n\n" + "\n".join(rest)


def play(
    tiny: SimpleNamespace, script: Callable[[str], str], options: ReActOptions, **gateway: Any
) -> tuple[FinishedTask, RecordedSession, list[str]]:
    """End, record, and what each row trains."""
    backend = tiny.backend()
    backend.script = script

    async def run() -> tuple[FinishedTask, RecordedSession]:
        async with serving(backend, tiny.tokenizer, **gateway) as door:
            session = door.open_session(sampling={"temperature": 1.0})
            done = await run_task(
                agent=ReActAgent(options),
                environment=ShellEnvironment(HERE),
                endpoint=door.endpoint(session),
                task=TASK,
                messages=[{"role": "user", "content": "copy alpha to out.txt"}],
                timeout_seconds=60,
            )
            return done, await door.close_session(session)

    done, record = asyncio.run(run())
    check_record(backend, record)
    return done, record, [trained_text(tiny.tokenizer, row) for row in rows_of_calls(record.calls)]


def by_turn(*turns: str) -> Callable[[str], str]:
    return lambda prompt: turns[prompt.count("<|im_start|>assistant") - 1]


BOTH = thinking("both", shell("cat a.txt"), shell("cat b.txt"))
COPY = thinking("copy", shell("cp a.txt out.txt"))
DONE = thinking("finished", "done")
