"""Runs an agent in an environment for the gateway's agent loop: reset, work, score, clean up.

Config: `rollout.custom.gateway_agent.agent=tree_rl.rollout.agents.in_environment.AgentInEnvironment`, with the
arguments below in `agent_options`.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tree_rl.rollout.agents.agents_by_name import TIMEOUT_SECONDS, build
from tree_rl.rollout.agents.task_agent import AgentError, TaskAgent
from tree_rl.rollout.branching.recorded_environment import RecordedEnvironment
from tree_rl.rollout.branching.recording import NotForked, Recording
from tree_rl.rollout.environments.environment import Environment, Outcome
from tree_rl.rollout.gateway.agent_protocol import UNREPORTED, AgentResult
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.sandbox.sandbox import SandboxDied, SandboxError
from tree_rl.rollout.sandbox.uninterrupted import uninterrupted

logger = logging.getLogger(__name__)

AGENT_END_S = 10.0
"""Wait for an agent to end after each of two cancellations; its model and tools already refuse its calls."""
Status = Literal[
    "completed", "limit", "out_of_calls", "timed_out", "agent_failed", "sandbox_died", "environment_failed"
]
SCORED: tuple[Status, ...] = ("completed", "limit", "out_of_calls", "timed_out", "agent_failed", "sandbox_died")
"""Statuses with a reward. `sandbox_died` after the start has reward 0.0, because the agent may have killed it."""
MISJUDGED = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of `score` that an agent's files can cause. They give reward 0.0, or agents could discard bad sessions."""
NOTHING_DONE = Outcome(answer="", turns=0, malformed_calls=0, is_complete=False, credit=UNREPORTED)


class SessionLost(RuntimeError):  # noqa: N818
    """A session that cannot be scored. It leaves no rows; its siblings continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTask:
    """How work on a task ended."""

    status: Status
    """completed: the agent ended by itself. limit: its limit of turns or the context length ended it. out_of_calls: it
    ended in any way after the gateway had refused a call beyond `max_calls`. timed_out: it took too long. agent_failed:
    it raised or crashed. sandbox_died: the sandbox had started and stopped answering. environment_failed: the
    environment did not start, or its machine failed."""
    reward: float | None = None
    """Reward of the session; None before it is scored, and if it cannot be scored."""
    outcome: Outcome = NOTHING_DONE
    detail: str = ""
    """Message of the error that ended the session; empty if none did."""


async def run_task(
    *,
    agent: TaskAgent,
    environment: Environment,
    endpoint: Endpoint,
    task: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    timeout_seconds: float,
) -> FinishedTask:
    """Work on one task. Failures become the status; any other exception is a bug.

    No model call, process or thread of the session runs while it is scored, or is left when this returns or is
    cancelled.

    Args:
        environment: a new environment; reset, scored and closed here.
        timeout_seconds: limit of the agent's work. The environment limits its start and scoring itself.
    """
    done = FinishedTask(status="environment_failed")
    is_reset = False
    try:
        await environment.reset(task)
        is_reset = True
        done = await _work(agent, environment, endpoint, messages, timeout_seconds)
        # Most programs crash after the refusal, and some end as if they were done.
        if done.status != "timed_out" and endpoint.ran_out_of_calls is not None and endpoint.ran_out_of_calls():
            done = replace(done, status="out_of_calls")
        done = replace(done, reward=await _score(environment, done.outcome))
    except SandboxDied as error:
        # The agent's commands, or tests of its code, may have killed the sandbox.
        done = replace(done, status="sandbox_died", detail=str(error), reward=0.0 if is_reset else None)
    except (SandboxError, OSError, ValueError, KeyError, RuntimeError) as error:
        done = replace(done, status="environment_failed", detail=f"{type(error).__name__}: {error}")
    finally:
        await uninterrupted(_close(environment))
    # The detail may quote text of the model.
    return replace(done, detail=done.detail.encode("utf-8", "backslashreplace").decode())


async def _work(
    agent: TaskAgent,
    environment: Environment,
    endpoint: Endpoint,
    messages: Sequence[Mapping[str, Any]],
    timeout_seconds: float,
) -> FinishedTask:
    """Let the agent work until it ends or its time is up, and stop everything it started.

    Raises `SandboxDied`, `SandboxError` and `NotForked`.
    """
    working = asyncio.create_task(agent.run(messages, environment=environment, endpoint=endpoint))
    try:
        await asyncio.wait({working}, timeout=timeout_seconds)
        timed_out = not working.done()
    finally:
        # Also if this task is cancelled.
        await uninterrupted(_stop(working, environment, endpoint))
    if timed_out:
        return FinishedTask(status="timed_out", detail=f"the agent took longer than {timeout_seconds:g} s")
    error = asyncio.CancelledError("the agent cancelled itself") if working.cancelled() else working.exception()
    if error is None:
        outcome = working.result()
        return FinishedTask(status="completed" if outcome.is_complete else "limit", outcome=outcome)
    if isinstance(error, SandboxDied | SandboxError | NotForked):
        raise error
    if isinstance(error, AgentError):
        return FinishedTask(status="agent_failed", detail=str(error))
    # The model may have caused the error. Without a reward it could discard bad sessions.
    logger.error("%s failed with what no agent should raise", type(agent).__name__, exc_info=error)
    return FinishedTask(status="agent_failed", detail=f"{type(error).__name__}: {error}")


async def _stop(working: asyncio.Task[Outcome], environment: Environment, endpoint: Endpoint) -> None:
    """End an agent, its model calls and its processes.

    An agent's thread cannot be cancelled: it ends when its model call is refused and its command was killed. So we stop
    those first, and then wait for the agent.
    """
    working.cancel()
    try:
        await endpoint.stop()
        # `stop` is optional: tools of some environments start no processes.
        if hasattr(environment, "stop"):
            await environment.stop()
    finally:
        for _ in range(2):
            if not working.done():
                await asyncio.wait({working}, timeout=AGENT_END_S)
                # Agents that caught the first cancellation get another.
                working.cancel()
        if not working.done():
            logger.error("an agent ignores its cancellation; the model and its tools refuse its calls")


async def _score(environment: Environment, outcome: Outcome) -> float:
    try:
        reward = await environment.score(outcome)
        if not math.isfinite(reward):
            raise ValueError(f"{type(environment).__name__}.score() returned {reward}: expected a finite number")
    except MISJUDGED as error:
        kind = type(error).__name__
        logger.warning("what an agent left cannot be judged and gets reward 0.0: %s: %s", kind, ascii(str(error)))
        return 0.0
    return reward


async def _close(environment: Environment) -> None:
    """Clean up. A failure here must not affect other sessions."""
    (error,) = await asyncio.gather(environment.close(), return_exceptions=True)
    if error is not None:
        logger.error("%s.close() failed", type(environment).__name__, exc_info=error)


class AgentInEnvironment:
    """Implements `tree_rl.rollout.gateway.agent_protocol.Agent`; one per session.

    Args:
        agent: one of `agents_by_name.AGENTS`, or a class as `package.module.Class`.
        options: fields of the agent's options.
        environment: one of `agents_by_name.ENVIRONMENTS`, or a class as `package.module.Class`.
        sandbox: fields of `SandboxOptions`, for environments with a sandbox; `limits` holds fields of `Limits`.
        environment_options: fields of the environment's options if it has no sandbox.
        timeout_seconds: limit of the agent's work, which is then scored as it is.

    Raises:
        ValueError: an unknown name, field or value; names the key.
    """

    def __init__(
        self,
        *,
        agent: str = "react",
        options: Mapping[str, Any] | None = None,
        environment: str = "swe",
        sandbox: Mapping[str, Any] | None = None,
        environment_options: Mapping[str, Any] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._name = agent
        self._agent, self._environment = build(agent, options, environment, sandbox, environment_options)

    def record(self, recording: Recording) -> None:
        """Record the tool calls of the session, and start where `recording.fork` says; call it before `run`."""
        self._environment = RecordedEnvironment(self._environment, recording)

    async def run(
        self, endpoint: Endpoint, *, messages: Sequence[Mapping[str, Any]], task: Mapping[str, Any]
    ) -> AgentResult:
        """Work on the task and score it. Raises `SessionLost` if it cannot be scored."""
        done = await run_task(
            agent=self._agent,
            environment=self._environment,
            endpoint=endpoint,
            task=task,
            messages=messages,
            timeout_seconds=self._timeout_seconds,
        )
        if done.reward is None:
            raise SessionLost(f"{done.status}: {done.detail}")
        if done.detail:
            # The model may have written parts of it, so escape control characters and indent each line.
            lines = [ascii(line)[1:-1] for line in done.detail.splitlines()]
            logger.warning("agent %s: session %s: %s", self._name, done.status, "\n    ".join(lines))
        figures = {f"ended_{status}": float(done.status == status) for status in SCORED}
        figures |= {"turns": float(done.outcome.turns), "malformed_calls": float(done.outcome.malformed_calls)}
        return AgentResult(reward=done.reward, status=done.status, figures=figures, credit=done.outcome.credit)
