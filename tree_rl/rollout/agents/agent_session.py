"""One session of any agent: from a fresh environment to a reward, a record and a status, whatever happens between."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tree_rl.rollout.agents.agent import Agent, AgentError
from tree_rl.rollout.environment import Environment, Outcome
from tree_rl.rollout.environments.sandbox import SandboxDied, SandboxError
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.session import RecordedSession

Status = Literal["completed", "limit", "timed_out", "agent_failed", "sandbox_died", "environment_failed"]
SCORED: tuple[Status, ...] = ("completed", "limit", "timed_out", "agent_failed")
"""Ends after which the environment still tells what was reached. After the others nobody knows: no reward, no rows."""
NOTHING_DONE = Outcome(answer="", turns=0, malformed_calls=0, is_complete=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSession:
    """What a session leaves."""

    status: Status
    """completed: the agent ended by itself; limit: a limit of turns, calls or context ended it; timed_out: the
    session's time did; agent_failed: the agent raised or crashed; sandbox_died: its commands got no answer;
    environment_failed: it never started, or could not be scored."""
    reward: float | None
    """None where the status says nothing about what was reached."""
    record: RecordedSession
    """Every model call."""
    outcome: Outcome
    detail: str
    """The error that ended it; empty if none did."""
    seconds: float
    """Wall-clock time."""


async def run_agent_session(
    *,
    gateway: Gateway,
    agent: Agent,
    environment: Environment,
    task: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    sampling: Mapping[str, Any],
    timeout_seconds: float,
) -> FinishedSession:
    """Run a session. What goes wrong becomes its status; an exception other than a cancellation is a defect of code.

    Args:
        gateway: listens.
        agent: fresh.
        environment: fresh; reset, scored and closed here.
        task: for the environment.
        messages: for the agent.
        sampling: the trainer's sampling parameters.
        timeout_seconds: of the agent's work; starting and scoring have the environment's own limits.
    """
    started = time.monotonic()
    session = gateway.open_session(sampling=sampling)
    status: Status = "environment_failed"
    outcome, reward, detail = NOTHING_DONE, None, ""
    try:
        await environment.reset(task)
        status, outcome, detail = await _work(
            lambda: agent.run(messages, environment=environment, endpoint=gateway.endpoint(session)), timeout_seconds
        )
        if status in SCORED:
            reward = await environment.score(outcome)
    except SandboxDied as error:
        status, reward, detail = "sandbox_died", None, str(error)
    except (SandboxError, OSError, ValueError, KeyError, RuntimeError) as error:
        status, reward, detail = "environment_failed", None, f"{type(error).__name__}: {error}"
    finally:
        record = await gateway.close_session(session)
        await environment.close()
    return FinishedSession(
        status=status,
        reward=reward,
        record=record,
        outcome=outcome,
        detail=detail,
        seconds=time.monotonic() - started,
    )


async def _work(run: Callable[[], Any], timeout_seconds: float) -> tuple[Status, Outcome, str]:
    try:
        async with asyncio.timeout(timeout_seconds):
            outcome: Outcome = await run()
    except TimeoutError:
        return "timed_out", NOTHING_DONE, f"the agent took longer than {timeout_seconds:g} s"
    except AgentError as error:
        return "agent_failed", NOTHING_DONE, str(error)
    return ("completed" if outcome.is_complete else "limit"), outcome, ""
