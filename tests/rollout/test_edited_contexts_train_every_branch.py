"""Agents that edit their context: as many rows as their requests allow, every generated token trained, none twice.

Requests have the shapes that harnesses send (docs/agents/context_editing.md): a step, a summary that replaces the
history, a new session, cleared tool results, sub-agents. What the least number of rows is follows from the requests
alone (benchmarks/agents/request_log.py), without a token. The real harnesses run where they are installed.
"""

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "agents"), str(ROOT / "recipes" / "swe_tasks")]

import context_editing  # noqa: E402
from request_log import RequestLog, least_rows  # noqa: E402
from scripted_model import HERMES, Dialect, ScriptedModel, differences  # noqa: E402

from tree_rl.rollout.gateway.backend import Generation  # noqa: E402
from tree_rl.rollout.gateway.gateway import Gateway  # noqa: E402
from tree_rl.rollout.gateway.options import GatewayOptions  # noqa: E402
from tree_rl.rollout.transcript import rows_of_calls  # noqa: E402

DIALECT = Dialect.of("hermes", HERMES.read_text(), "<|im_end|>")
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}}


class MarkedModel(ScriptedModel):
    """Calls the shell in every turn, with a mark of its own."""

    async def generate(self, prompt_ids: Any, **more: Any) -> Generation:
        mark = f"mark-{len(self.prompts) + 1:06d}"
        self.turns = [*self.turns, self.dialect.writes("", ("shell", {"command": f"echo {mark}"}))]
        return await ScriptedModel.generate(self, prompt_ids, **more)


@dataclass
class Client:
    """A conversation in one protocol, as lists of messages that it sends whole."""

    http: httpx.AsyncClient
    log: RequestLog
    url: str
    protocol: str
    system: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Of this protocol."""

    def says(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    async def ask(self) -> None:
        """One call of the model, and its tool's result."""
        if self.protocol == "chat":
            tool = {"type": "function", "function": {"name": "shell", "parameters": SHELL}}
            head = [{"role": "system", "content": self.system}]
            answer = await self._post("/v1/chat/completions", {"messages": [*head, *self.messages], "tools": [tool]})
            said = answer["choices"][0]["message"]
            self.messages.append({name: said[name] for name in ("role", "content", "tool_calls")})
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": self._output()}
        else:
            tool = {"name": "shell", "input_schema": SHELL}
            body = {"system": self.system, "messages": self.messages, "tools": [tool], "max_tokens": 2000}
            answer = await self._post("/v1/messages", body)
            self.messages.append({"role": "assistant", "content": answer["content"]})
            (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": self._output()}
            result = {"role": "user", "content": [block]}
        self.messages.append(result)

    def clear(self, kept: int) -> None:
        """Old tool results become a short text, the last ones stay."""
        results = [message for message in self.messages if self._result(message)]
        for message in results[: max(0, len(results) - kept)]:
            self._result(message)["content"] = "[cleared]"

    def _result(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool":
            return message
        blocks = message["content"] if isinstance(message["content"], list) else []
        return next((block for block in blocks if block["type"] == "tool_result"), {})

    def _output(self) -> str:
        return f"output {len(self.log.paths)}\nof a command"

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        sent = json.loads(json.dumps({"model": "policy", **body}))
        answer = await self.http.post(self.url + path, json=sent)
        answer.raise_for_status()
        self.log.add(sent, answer.content)
        return dict(answer.json())


async def play(protocol: str, edits: list[str]) -> tuple[int, int, int, int]:
    """Calls, rows, least rows and differences of a session with these edits."""
    model, log = MarkedModel(dialect=DIALECT, tool="", turns=[]), RequestLog()
    options = GatewayOptions(max_context_tokens=100_000, max_turn_tokens=2000)
    async with Gateway(tokenizer=DIALECT.tokenizer, backend=model, options=options) as gateway:
        session = gateway.open_session()
        endpoint = gateway.endpoint(session)
        headers = {"authorization": f"Bearer {endpoint.token}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:

            def begin(system: str) -> Client:
                client = Client(http, log, endpoint.url, protocol, system)
                client.says("Repair the cache.")
                return client

            main = begin("You repair software.")
            await main.ask()
            for number, edit in enumerate(edits):
                if edit == "compact":
                    asking = Client(http, log, endpoint.url, protocol, main.system, list(main.messages))
                    asking.says("Summarize our conversation.")
                    await asking.ask()
                    main = begin(main.system)
                    main.says(f"So far: summary {number}")
                elif edit == "new session":
                    main = begin(main.system)
                elif edit == "clear":
                    main.clear(1)
                elif edit == "sub-agents":
                    subs = [begin(f"You are sub-agent {number}.{one}.") for one in range(2)]
                    await asyncio.gather(*(sub.ask() for sub in subs))
                    await asyncio.gather(*(sub.ask() for sub in subs))
                await main.ask()
        record = await gateway.close_session(session)
    rows = rows_of_calls(record.calls)
    assert record.refused == {}
    return len(record.calls), len(rows), least_rows(log.paths), differences(model, record)


KINDS = ("step", "compact", "new session", "clear", "sub-agents")


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize(
    ("kind", "least"), [("step", 1), ("compact", 2), ("new session", 2), ("clear", 2), ("sub-agents", 3)]
)
def test_each_edit_leaves_its_rows(protocol: str, kind: str, least: int) -> None:
    calls, rows, possible, wrong = asyncio.run(play(protocol, ["step", kind, "step"]))
    assert (rows, possible, wrong) == (least, least, 0)
    assert calls == 4 + {"compact": 1, "sub-agents": 4}.get(kind, 0)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["chat", "messages"]), st.lists(st.sampled_from(KINDS), max_size=6))
def test_edits_in_any_order_leave_the_fewest_rows(protocol: str, edits: list[str]) -> None:
    _, rows, possible, wrong = asyncio.run(play(protocol, edits))
    assert (rows, wrong) == (possible, 0)


def test_fewest_rows_by_hand() -> None:
    task, first, second = ("user", "task"), ("made", "1"), ("made", "2")
    assert least_rows([(task, first)]) == 1
    assert least_rows([(task, first), (task, first, ("tool", "a"), second)]) == 1
    assert least_rows([(task, first), (task, ("made", "other"), ("tool", "a"), second)]) == 2
    assert least_rows([(task, first), (task, second)]) == 2
    assert least_rows([]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", context_editing.CASES)
def test_real_harnesses_leave_the_fewest_rows(name: str) -> None:
    case = context_editing.CASES[name]
    if case.harness not in context_editing.installed(sys.executable, [case.harness]):
        pytest.skip(f"{case.harness} is not installed")
    line = asyncio.run(context_editing.play(name, case, []))
    assert (line.rows, line.differences, line.ended) == (line.least_rows, 0, "completed")
    assert line.summaries > 0 if case.kind == "compaction" else line.rows > 1 or case.kind == "session continued"
