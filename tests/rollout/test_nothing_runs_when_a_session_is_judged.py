"""Whatever ended a session: no command, thread or model call of it runs any more when it is scored."""

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_harness import talking, user
from live_processes import running
from sandboxes_here import HERE
from small_swe import ScriptedModel, all_tasks, play
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents import in_environment
from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.mini_swe import MiniSweAgent
from tree_rl.rollout.agents.react import ReActAgent
from tree_rl.rollout.agents.task_agent import AgentError, TaskAgent
from tree_rl.rollout.environments import Outcome, ShellEnvironment, ToolCall
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.gateway.agent_protocol import UNREPORTED
from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.sandbox.sandbox import SandboxDied, SandboxError

MARK = "61.91"
DONE = Outcome(answer="", turns=1, malformed_calls=0, is_complete=True)
Play = Callable[..., Awaitable[Outcome]]


class Shell(ShellEnvironment):
    """Its files must not change any more, and nothing may run, after `score` began."""

    async def score(self, outcome: Outcome) -> float:
        seen = set()
        for _ in range(20):
            seen.add(await self.sandbox.read("beat"))
            await asyncio.sleep(0.02)
        assert len(seen) == 1, seen
        assert not running(MARK)
        return 0.5


def shell(command: str) -> ToolCall:
    return ToolCall(name="shell", arguments={"command": command})


BEAT = f"while true; do date +%N > beat; sleep 0.01; done; : {MARK}"


async def run(act: Play, environment: Any = None, seconds: float = 60.0, **task: Any) -> FinishedTask:
    agent = SimpleNamespace(run=lambda messages, **given: act(**given))
    endpoint = Endpoint(url="http://127.0.0.1:1", token="t", model="m")
    asked = {"task": {"files": {}, **task}, "messages": [], "timeout_seconds": seconds}
    return await run_task(agent=agent, environment=environment or Shell(HERE), endpoint=endpoint, **asked)


async def waits(environment: Any, endpoint: Endpoint) -> Outcome:
    await environment.call(shell(BEAT))
    return DONE


async def returns(environment: Any, endpoint: Endpoint) -> Outcome:
    left.append(asyncio.create_task(environment.call(shell(BEAT))))
    await asyncio.sleep(0.5)
    return DONE


async def fails(environment: Any, endpoint: Endpoint) -> Outcome:
    await returns(environment, endpoint)
    raise AgentError("no more")


async def catches_its_cancellation(environment: Any, endpoint: Endpoint) -> Outcome:
    while True:
        try:
            await environment.call(shell(BEAT))
        except asyncio.CancelledError:
            continue


async def leaves_a_task(environment: Any, endpoint: Endpoint) -> Outcome:
    async def go_on() -> None:
        for _ in range(100):
            try:
                await environment.call(shell(BEAT))
            except (SandboxDied, asyncio.CancelledError):
                await asyncio.sleep(0.01)

    left.append(asyncio.create_task(go_on()))
    await asyncio.sleep(0.3)
    return DONE


left: list[asyncio.Task[Any]] = []
"""Tasks that agents leave behind while they run a command."""
ENDS: Mapping[Play, str] = {
    waits: "timed_out",
    returns: "completed",
    fails: "agent_failed",
    catches_its_cancellation: "timed_out",
    leaves_a_task: "completed",
}


@pytest.mark.parametrize("act", ENDS)
def test_nothing_changes_the_files_while_they_are_scored(act: Play) -> None:
    done = asyncio.run(run(act, seconds=1.0 if ENDS[act] == "timed_out" else 60.0))
    assert (done.status, done.reward) == (ENDS[act], 0.5), done
    assert (done.outcome.credit == UNREPORTED) == (done.status != "completed")
    assert not running(MARK)


@pytest.mark.parametrize("agent", [ReActAgent, MiniSweAgent])
def test_no_model_call_is_open_or_answered_while_a_session_is_scored(
    agent: Callable[[], TaskAgent], chatml: PreTrainedTokenizerFast
) -> None:
    class Slow(ScriptedModel):
        running = 0

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            Slow.running += 1
            try:
                await asyncio.sleep(3600)
            finally:
                Slow.running -= 1

    class Asked(SweEnvironment):
        async def score(self, outcome: Outcome) -> float:
            assert Slow.running == 0
            for thread in threading.enumerate():
                if thread.name.startswith("mini-swe"):
                    thread.join(1)  # its work has ended; the thread itself is on its way out
                    assert not thread.is_alive()
            return 0.5

    (session,) = play(Slow(chatml, str), [(agent(), all_tasks()["lru_cache"])], seconds=5, environment=Asked)
    assert session.result == ("timed_out", 0.5) and session.record.cancelled == 1


async def test_a_stopped_session_answers_403_and_keeps_its_record(chatml: PreTrainedTokenizerFast) -> None:
    async with talking(ScriptedModel(chatml, lambda prompt: "so")) as talk:
        body = {"messages": [user("a")]}
        assert (await talk.http.post("/v1/chat/completions", json=body)).status_code == 200
        await talk.endpoint.named("sub").stop()
        refused = await talk.http.post("/v1/chat/completions", json=body)
        records = await asyncio.gather(*[talk.gateway.close_session(talk.session) for _ in range(3)])
        assert records[0] is records[1] is records[2] is await talk.gateway.close_session(talk.session)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "session_over")
    assert len(records[0].calls) == 1


@pytest.mark.parametrize(
    ("error", "judged", "result"),
    [
        *((error("x"), 0.5, ("agent_failed", 0.5)) for error in (AgentError, ValueError, TimeoutError, OSError)),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), 0.5, ("agent_failed", 0.5)),
        (asyncio.CancelledError(), 0.5, ("agent_failed", 0.5)),
        (SandboxDied("gone"), 0.5, ("sandbox_died", 0.0)),
        (SandboxError("no image"), 0.5, ("environment_failed", None)),
        *((None, error("x"), ("completed", 0.0)) for error in (ValueError, KeyError, TypeError, AttributeError)),
        *((None, error("x"), ("completed", 0.0)) for error in (ArithmeticError, RecursionError)),
        (None, math.nan, ("completed", 0.0)),
        (None, SandboxDied("no answer"), ("sandbox_died", 0.0)),
        (None, SandboxError("no image"), ("environment_failed", None)),
        (None, OSError("disk"), ("environment_failed", None)),
    ],
)
def test_only_the_machine_can_end_a_session_without_a_reward(
    error: BaseException | None, judged: Any, result: tuple[str, float | None]
) -> None:
    """An agent that fails is scored, what cannot be judged gets nothing, and a broken judge loses the session."""

    class Judge(ShellEnvironment):
        async def score(self, outcome: Outcome) -> float:
            if isinstance(judged, Exception):
                raise judged
            return judged

    async def act(environment: Any, endpoint: Endpoint) -> Outcome:
        if error is not None:
            raise error
        return DONE

    environment = Judge(HERE)
    done = asyncio.run(run(act, environment))
    assert (done.status, done.reward) == result, done
    assert done.detail.encode() or error is None
    with pytest.raises(SandboxDied, match="gone"):
        asyncio.run(environment.sandbox.read("closed"))


async def test_a_clean_up_that_fails_is_logged_and_fails_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Shell):
        async def close(self) -> None:
            await super().close()
            raise OSError("cannot remove")

    with caplog.at_level(logging.ERROR):
        done = await run(returns, Broken(HERE))
    assert (done.status, done.reward) == ("completed", 0.5)
    assert "Broken.close() failed" in caplog.text and "cannot remove" in caplog.text


async def test_an_agent_that_never_ends_is_scored_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_environment, "AGENT_END_S", 0.2)
    over = asyncio.Event()

    async def stubborn(environment: Any, endpoint: Endpoint) -> Outcome:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()
        return DONE

    assert (await run(stubborn, seconds=0.1)).reward == 0.5
    over.set()
    await asyncio.sleep(0)


async def test_the_check_runs_on_a_copy_that_the_agent_never_wrote_to() -> None:
    async def act(environment: Any, endpoint: Endpoint) -> Outcome:
        await environment.call(shell("echo work > done; ln -s /etc/passwd link; mkfifo pipe; chmod 0 kept"))
        return DONE

    async def play(check: str | None) -> FinishedTask:
        return await run(act, ShellEnvironment(HERE), files={"kept": "here"}, check=check)

    assert (await play("grep work done && test ! -e link && test ! -e pipe && touch new")).reward == 1.0
    assert (await play("false")).reward == 0.0
    assert (await play(None)).detail.startswith("RuntimeError: extra_info.check=None: expected a shell command")
