"""What a scripted model says to the native agent in a task of two files, turn by turn."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gateway_harness import TinyModel, talking, trained_texts, user
from protocol_turns import shell, thinking
from sandboxes_here import HERE

from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.react import ReActAgent, ReActOptions
from tree_rl.rollout.environments import ShellEnvironment
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.verl_plugin.agent_loops.tool_agent_loop import as_gateway_agent

TASK = {"files": {"a.txt": "alpha\n", "b.txt": "beta\n"}, "check": "grep -q alpha out.txt"}


async def act(endpoint: Endpoint, environment: Any, options: ReActOptions | None = None) -> FinishedTask:
    """The agent's work on the task."""
    agent, messages = ReActAgent(options or ReActOptions()), [user("copy alpha to out.txt")]
    asked = {"task": TASK, "messages": messages, "timeout_seconds": 60}
    return await run_task(agent=agent, environment=environment, endpoint=endpoint, **asked)


async def play(
    tiny: SimpleNamespace,
    script: Callable[[str], str],
    options: ReActOptions | None = None,
    backend: Any = None,
    **gateway: Any,
) -> tuple[FinishedTask, RecordedSession, list[str]]:
    """End, record, and what each row trains."""
    backend = backend or TinyModel(tiny.model, tiny.tokenizer, script)
    async with talking(backend, **gateway) as talk:
        done = await act(talk.endpoint, ShellEnvironment(HERE), options)
    return done, talk.record, trained_texts(backend.tokenizer, talk.record.calls)


def as_tree_agent(**options: Any) -> dict[str, Any]:
    """What `custom.tree_agent` with these options plays, for `play`."""
    config = as_gateway_agent(options)
    limit = config["gateway"]["max_turn_tokens"]
    limits = {} if limit is None else {"max_turn_tokens": limit}
    reasoning = config["gateway"]["reasoning"]
    return {"options": ReActOptions(**config["agent_options"]["options"]), "reasoning": reasoning, **limits}


def by_turn(*turns: str) -> Callable[[str], str]:
    return lambda prompt: turns[prompt.count("<|im_start|>assistant") - 1]


BOTH = thinking("both", shell("cat a.txt"), shell("cat b.txt"))
COPY = thinking("copy", shell("cp a.txt out.txt"))
DONE = thinking("finished", "done")
