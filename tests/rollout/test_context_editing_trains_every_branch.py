"""Compaction, /clear, cleared results and sub-agents: every branch trains, in as few rows as the requests allow."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import SHELL, talking, user
from protocol_turns import misspelling, shell

from tree_rl.rollout.transcript import rows_of_calls

CONTEXT_TOKENS = 1100
REMINDER = "<system-reminder>\nYou can use the following context:\n</system-reminder>\n\n"
CLAUDE_TOOL = {"name": "shell", "input_schema": SHELL["function"]["parameters"]}
OPENCODE = {"role": "system", "content": "You are opencode."}
RESULT = "file " * 60


class ClaudeTalk:
    """A conversation as Claude Code has it."""

    def __init__(self, http: httpx.AsyncClient, *messages: Mapping[str, Any]) -> None:
        self.http, self.messages = http, list(messages)

    @staticmethod
    def says(*texts: str) -> dict[str, Any]:
        blocks = [{"type": "text", "text": text} for text in texts]
        return {"role": "user", "content": [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]}

    async def ask(self, agent: str = "") -> int:
        """Ask, and append the answer. Returns the status."""
        system = [{"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}}]
        body = {"model": "m", "max_tokens": 300, "system": system, "tools": [CLAUDE_TOOL], "messages": self.messages}
        headers = {"anthropic-version": "2023-06-01", **({"x-claude-code-agent-id": agent} if agent else {})}
        answer = await self.http.post("/v1/messages", json=body, headers=headers)
        if answer.status_code == 200:
            self.messages.append({"role": "assistant", "content": answer.json()["content"]})
        return answer.status_code

    async def work(self, rounds: int, agent: str = "") -> int:
        """Run the commands that the model asks for, and ask. Returns the last status."""
        for _ in range(rounds):
            calls = [block["id"] for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": one, "content": RESULT} for one in calls]
            self.messages += [{"role": "user", "content": results}] if results else []
            status = await self.ask(agent)
        return status


async def ask_as_opencode(http: httpx.AsyncClient, messages: list[Any], tools: Sequence[Any] = (SHELL,)) -> str:
    """Ask, and append the answer as opencode keeps it. Returns its text."""
    body = {"model": "m", "max_tokens": 300, "tools": tools, "messages": messages}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()["choices"][0]["message"]
    kept = {"role": "assistant", "content": said["content"] or ""}
    messages.append(kept | ({"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}))
    return kept["content"]


async def work_as_opencode(http: httpx.AsyncClient, messages: list[Any], rounds: int) -> None:
    """Run the commands that the model asks for, and ask."""
    for _ in range(rounds):
        calls = messages[-1].get("tool_calls", ())
        messages += [{"role": "tool", "tool_call_id": one["id"], "content": RESULT} for one in calls]
        await ask_as_opencode(http, messages)


async def claude_compacts(http: httpx.AsyncClient) -> None:
    """A request of more tokens than the model takes gets status 400; Claude Code summarizes, and keeps the latest."""
    talk = ClaudeTalk(http, ClaudeTalk.says(REMINDER, "Repair it."))
    while (status := await talk.work(1)) == 200:
        pass
    assert status == 400 and len(talk.messages) > 8
    earlier, latest = talk.messages[:-4], talk.messages[-4:]
    asked = ClaudeTalk.says(
        "CRITICAL: Respond with TEXT ONLY.\nYour task is to create a detailed summary of the conversation so far"
    )
    asked["content"] = [*earlier[-1]["content"], *asked["content"]]
    summarizing = ClaudeTalk(http, *earlier[:-1], asked)
    assert await summarizing.ask() == 200
    told = summarizing.messages[-1]["content"][-1]["text"]
    opening = ClaudeTalk.says(REMINDER, f"This session is being continued from a previous conversation. {told}")
    again = ClaudeTalk(http, opening, *latest)
    assert await again.work(3) == 200


async def claude_clears(http: httpx.AsyncClient) -> None:
    """A new conversation under the same opening."""
    for opening in (("Repair it.",), ("<command-name>/clear</command-name>", "<local-command-stdout>", "Test it.")):
        assert await ClaudeTalk(http, ClaudeTalk.says(REMINDER, *opening)).work(5) == 200


async def claude_forks(http: httpx.AsyncClient) -> None:
    """Two sub-agents at once, whose turns read alike. Each goes on with its own."""

    async def explore(agent: str) -> None:
        talk = ClaudeTalk(http, ClaudeTalk.says(REMINDER, f"Look into {agent}."))
        assert await talk.work(4, agent) == 200

    main = ClaudeTalk(http, ClaudeTalk.says(REMINDER, "Repair it."))
    assert await main.work(2) == 200
    await asyncio.gather(explore("a1"), explore("b2"))
    assert await main.work(2) == 200


async def opencode_compacts(http: httpx.AsyncClient) -> None:
    """A summary by an agent without tools replaces the conversation."""
    messages = [OPENCODE, user("Repair it.")]
    await work_as_opencode(http, messages, 5)
    said = "\n".join(str(message["content"]) for message in messages[1:])
    summarizer = {"role": "system", "content": "You are a context summarization agent."}
    summary = await ask_as_opencode(http, [summarizer, user(f"<conversation>\n{said}")], tools=())
    told = [user("What did we do so far?"), {"role": "assistant", "content": summary}, user("Continue.")]
    await work_as_opencode(http, [OPENCODE, *told], 4)


async def opencode_prunes(http: httpx.AsyncClient) -> None:
    """Old results of tools lose their text, in the place where they stand."""
    messages = [OPENCODE, user("Repair it.")]
    await work_as_opencode(http, messages, 5)
    for message in messages[2:8]:
        if message["role"] == "tool":
            message["content"] = "[Old tool result content cleared]"
    await work_as_opencode(http, messages, 3)


ROWS = {claude_compacts: 3, claude_clears: 2, claude_forks: 3, opencode_compacts: 3, opencode_prunes: 2}
"""Kind of editing -> the fewest rows that its requests allow."""


def working(prompt: str) -> str:
    """What the model says: the same each time, but where it is asked to sum up."""
    if "detailed summary" in prompt.rsplit("<|im_start|>user", 1)[-1] or "summarization agent" in prompt:
        return "<summary>half done</summary>"
    return shell("ls")


@pytest.mark.parametrize("edits", ROWS, ids=lambda edits: edits.__name__)
async def test_every_branch_trains_in_as_few_rows_as_the_requests_allow(edits: Any, tiny: SimpleNamespace) -> None:
    async with talking(misspelling(tiny, working), max_context_tokens=CONTEXT_TOKENS, max_turn_tokens=300) as talk:
        await edits(talk.http)
    compacts = edits in (claude_compacts, opencode_compacts)
    assert len(rows_of_calls(talk.record.calls)) == ROWS[edits]
    assert [call.side for call in talk.record.calls if call.side] == (["summary"] if compacts else [])
    assert {call.agent for call in talk.record.calls} == ({"main", "a1", "b2"} if edits is claude_forks else {"main"})
    assert dict(talk.record.refused) == ({400: 1} if edits is claude_compacts else {})
