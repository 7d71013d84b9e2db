"""An environment that records its tool calls, and can start in the state that another session had at a cut."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tree_rl.rollout.branching.recording import NotForked, RecordedCall, Recording
from tree_rl.rollout.environments.environment import Environment, Outcome, ToolCall
from tree_rl.rollout.sandbox.errors import SandboxDied, SandboxError
from tree_rl.rollout.sandbox.files.trees import remove_tree

logger = logging.getLogger(__name__)


class RecordedEnvironment:
    """Wraps the environment of one session.

    A branch gets the recorded results of the calls before its cut. Its environment starts from a copy of the files; or
    the recorded calls are executed again, and every result must be the recorded one.
    """

    def __init__(self, environment: Environment, recording: Recording) -> None:
        self._environment = environment
        self._recording = recording
        self._expected = [] if recording.fork is None else recording.fork.tool_calls
        # These follow the numbers of the calls before the cut.
        self._next_begin = 1 + max((one.began for one in self._expected), default=-1)
        self._next_end = 1 + max((one.ended for one in self._expected), default=-1)
        self._running = 0

    async def reset(self, task: Mapping[str, Any]) -> None:
        """As the environment's; raises `NotForked` if the session does not repeat itself."""
        saved = self._expected[-1].saved if self._expected else None
        if saved is not None:
            await self._environment.restore(task, saved)
            return
        await self._environment.reset(task)
        for before in sorted(self._expected, key=lambda one: one.began):
            self._recording.replayed_calls += 1
            result = await self._environment.call(before.call)
            if result != before.result:
                raise self._differs(f"{before.call.name} returned {result[-200:]!r}, not {before.result[-200:]!r}")

    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._environment.tools()

    async def call(self, call: ToolCall) -> str:
        if self._expected:
            return self._repeated(call)
        started = time.monotonic()
        number = self._next_begin
        self._next_begin += 1
        self._running += 1
        try:
            result = await self._environment.call(call)
            ended, done = time.monotonic(), self._next_end
            self._next_end += 1
            saved = await self._saved() if self._recording.copies and self._running == 1 else None
        finally:
            self._running -= 1
        made = RecordedCall(call=call, result=result, seconds=(started, ended), began=number, ended=done, saved=saved)
        self._recording.tool_calls.append(made)
        return result

    async def _saved(self) -> Path | None:
        """A copy of the files; None if that failed, or if another call began meanwhile."""
        if not hasattr(self._environment, "save"):
            return None
        next_begin, folder = self._next_begin, None
        try:
            folder = self._recording.folder_for_copy()
            if await self._environment.save(folder) and next_begin == self._next_begin:
                return folder
        except (OSError, SandboxError, SandboxDied):
            logger.warning("a copy of session %d failed; branches replay", self._recording.number, exc_info=True)
        if folder is not None:
            await asyncio.to_thread(remove_tree, folder)
        return None

    def _repeated(self, call: ToolCall) -> str:
        # Of equal calls, the agent asks first for the one that began first.
        before = min((one for one in self._expected if one.call == call), key=lambda one: one.began, default=None)
        if before is None:
            raise self._differs(f"the agent called {call.name}, which the recorded session did not")
        self._expected.remove(before)
        now = time.monotonic()
        self._recording.tool_calls.append(replace(before, seconds=(now, now)))
        return before.result

    def _differs(self, reason: str) -> NotForked:
        self._recording.fault = f"the session does not repeat itself: {reason}"
        return NotForked(self._recording.fault)

    async def stop(self) -> None:
        if hasattr(self._environment, "stop"):
            await self._environment.stop()

    async def score(self, outcome: Outcome) -> float:
        return await self._environment.score(outcome)

    async def close(self) -> None:
        await self._environment.close()
