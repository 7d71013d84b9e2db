"""Sixty-four sessions at once, agents in sandboxes, most of them with a fault: each ends with its own status.

What the model wrote is recorded and trained in all of them; no process, directory, file or task is left behind.
"""

import asyncio
import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import CHATML, build_tokenizer, serving, trained_text
from live_processes import running
from protocol_turns import shell
from sandboxes_here import HERE
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.agents import react
from tree_rl.rollout.agents.in_environment import FinishedTask, run_task
from tree_rl.rollout.agents.react import MALFORMED, ReActAgent, ReActOptions
from tree_rl.rollout.environments.cases import Case
from tree_rl.rollout.environments.swe import SweEnvironment
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.backend import BackendError, Generation
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.transcript import rows_of_calls

SESSIONS = 64
MARK = "61.73"
"""Seconds that left-over processes would sleep: what they are known by."""
MARKED = "sleep " + MARK
TASK = SweTask(
    instance_id="done",
    problem_statement="",
    fail_to_pass=("done",),
    log_format="cases",
    cases=(Case(name="done", program="import os\nreturn os.path.exists('done')", expected='{"value": true}'),),
    files={"README": "write the file done\n"},
)
COMMANDS: Mapping[str, str] = {
    "healthy": "cat README",
    "ten megabytes": "head -c 10485760 /dev/zero | tr '\\0' x",
    "no utf-8": "printf '\\377\\376 \\303\\050'",
    "hanging command": MARKED,
    "left in the background": f"{MARKED} & {MARKED} & echo started",
    "ignores signals": f"trap '' TERM INT HUP; ({MARKED} &) ; echo started",
    "dead sandbox": "echo last words",
}
"""The first command of a session of that kind; then it does what was asked."""
SERVER_FAULTS = ("429", "500 for ever", "hanging model")
KINDS = (*COMMANDS, "invalid json", *SERVER_FAULTS)
KINDS_OF_SESSIONS = [KINDS[number % len(KINDS)] for number in range(SESSIONS)]
ENDS = defaultdict(
    lambda: ("completed", 1.0),
    {"dead sandbox": ("sandbox_died", 0.0), "500 for ever": ("agent_failed", 0.0), "hanging model": ("timed_out", 0.0)},
)
READS: Mapping[str, str] = {
    "ten megabytes": "[output cut]",
    "no utf-8": "\ufffd",
    "hanging command": "[timed out]",
    "left in the background": "started",
    "ignores signals": "started",
    "invalid json": MALFORMED,
}
"""What the agent is told of a fault."""


class FaultyServer:
    """Plays the turns of each session, and fails where its kind says so."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.written: dict[int, list[str]] = defaultdict(list)
        self.read: dict[int, str] = {}
        self.faults: Counter[int] = Counter()
        self.running = 0
        self.hanging = 0
        self.all_hang = asyncio.Event()

    async def generate(self, prompt_ids: Sequence[int], **_: Any) -> Generation:
        prompt = self.tokenizer.decode(list(prompt_ids))
        number, kind = re.findall(r"session (\d+): ([^<\n]+)", prompt)[0]
        self.read[int(number)] = prompt
        self.running += 1
        try:
            await self._fail(int(number), kind)
        finally:
            self.running -= 1
        turn = self._turns(kind)[len(self.written[int(number)])]
        self.written[int(number)].append(turn)
        ids = [*self.tokenizer.encode(turn, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Generation(token_ids=tuple(ids), log_probs=(-0.5,) * len(ids), finish_reason="stop")

    async def _fail(self, number: int, kind: str) -> None:
        await asyncio.sleep(0.01 * (number % 7))
        if kind not in SERVER_FAULTS or not self.written[number]:
            return
        self.faults[number] += 1
        if kind == "hanging model":
            self.hanging += 1
            if self.hanging == KINDS_OF_SESSIONS.count(kind):
                self.all_hang.set()
            await asyncio.sleep(3600)
        if kind == "500 for ever":
            raise BackendError("broken")
        if self.faults[number] == 1:
            raise BackendError("busy", status=429, retry_after=0.1)

    @staticmethod
    def _turns(kind: str) -> list[str]:
        broken = '<tool_call>\n{"name": "shell", "arguments": {"command": \n</tool_call>'
        first = broken if kind == "invalid json" else shell(COMMANDS.get(kind, "true"))
        return [first, shell("touch done"), "Done."]


class Environment(SweEnvironment):
    """A real sandbox with limits; one of them dies."""

    def __init__(self, kind: str) -> None:
        # Sixty-four sandboxes start at once; on a busy machine a healthy command takes long.
        self.limits = Limits(timeout_seconds=90, output_bytes=4096, processes=16)
        super().__init__(replace(HERE, limits=self.limits))
        self.dies = kind == "dead sandbox"
        self.hangs = kind == "hanging command"

    async def run(self, command: str) -> Any:
        if self.dies and "touch done" in command:
            await self._sandbox.close()  # type: ignore[union-attr]
        if self.hangs:
            seconds = 4 if command == MARKED else 90
            self._sandbox._folder.limits = replace(self.limits, timeout_seconds=seconds)  # type: ignore[union-attr]
        return await super().run(command)


async def play_all(server: FaultyServer) -> list[tuple[FinishedTask, RecordedSession]]:
    async with serving(server, server.tokenizer, max_context_tokens=20_000, max_turn_tokens=400) as gateway:

        async def play(number: int) -> tuple[FinishedTask, RecordedSession]:
            kind = KINDS_OF_SESSIONS[number]
            if kind != "hanging model":
                # Those have little time for their first turn: the others start when they hang.
                await asyncio.wait_for(server.all_hang.wait(), 100)
            session = gateway.open_session()
            done = await run_task(
                agent=ReActAgent(ReActOptions(max_turns=4)),
                environment=Environment(kind),
                endpoint=gateway.endpoint(session),
                task={"swe": TASK.to_row()},
                messages=[{"role": "user", "content": f"session {number}: {kind}"}],
                timeout_seconds=8 if kind == "hanging model" else 120,
            )
            return done, await gateway.close_session(session)

        finished = await asyncio.gather(*[play(number) for number in range(SESSIONS)])
        assert not gateway._http.sessions() and server.running == 0
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return finished


@pytest.fixture(autouse=True)
def few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions with faults end soon."""
    monkeypatch.setattr(react, "MAX_RETRIES", 1)


def test_every_session_ends_as_it_should_and_nothing_is_lost_or_left(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    server = FaultyServer(build_tokenizer(CHATML))
    files_before = len(os.listdir("/proc/self/fd"))
    finished = asyncio.run(play_all(server))

    for number, (done, record) in enumerate(finished):
        kind = KINDS_OF_SESSIONS[number]
        assert (done.status, done.reward) == ENDS[kind], (number, kind, done, server.read[number][-600:])
        written = [turn + "<|im_end|>" for turn in server.written[number]]
        assert len(written) == {"completed": 3, "sandbox_died": 2}.get(done.status, 1)
        assert [server.tokenizer.decode(call.response_ids) for call in record.calls] == written
        (row,) = rows_of_calls(record.calls)
        assert trained_text(server.tokenizer, row) == "".join(written)
        assert READS.get(kind, "") in server.read[number], (kind, server.read[number][-300:])
        assert record.refused == {"429": {429: 1}, "500 for ever": {500: 2}, "hanging model": {403: 1}}.get(kind, {})
        assert record.cancelled == (kind == "hanging model")
    assert not list(open_folder.iterdir()), "no sandbox is left"
    assert not running(MARK)
    assert len(os.listdir("/proc/self/fd")) <= files_before
