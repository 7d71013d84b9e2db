"""Compaction, /clear, cleared results and sub-agents: every branch trains, in as few rows as the requests allow."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_harness import talking
from protocol_turns import call, misspelling

from tree_rl.rollout.transcript import rows_of_calls

CONTEXT_TOKENS = 1100
REMINDER = "<system-reminder>\nYou can use the following context:\n</system-reminder>\n\n"
CLAUDE_TOOL = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
OPENCODE_TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "Runs a command.", "parameters": CLAUDE_TOOL["input_schema"]},
}


class HarnessTalk:
    """A conversation, and fields of its requests."""

    def __init__(self, http: httpx.AsyncClient, *messages: Mapping[str, Any], **fields: Any) -> None:
        self.http, self.messages, self.fields = http, list(messages), fields


class ClaudeTalk(HarnessTalk):
    @staticmethod
    def says(*texts: str) -> dict[str, Any]:
        blocks = [{"type": "text", "text": text} for text in texts]
        return {"role": "user", "content": [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]}

    async def ask(self, agent: str = "") -> int:
        """Ask, and append the answer. Returns the status."""
        system = [{"type": "text", "text": "You are a Claude agent.", "cache_control": {"type": "ephemeral"}}]
        body = {"model": "m", "max_tokens": 300, "system": system, "tools": [CLAUDE_TOOL], "messages": self.messages}
        headers = {"anthropic-version": "2023-06-01", **({"x-claude-code-agent-id": agent} if agent else {})}
        answer = await self.http.post("/v1/messages", json={**body, **self.fields}, headers=headers)
        if answer.status_code == 200:
            self.messages.append({"role": "assistant", "content": answer.json()["content"]})
        return answer.status_code

    async def work(self, rounds: int, agent: str = "") -> int:
        """Run the commands that the model asks for. Returns the last status."""
        status = 200
        for _ in range(rounds):
            calls = [block["id"] for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": one, "content": "file " * 60} for one in calls]
            self.messages.append({"role": "user", "content": results})
            status = await self.ask(agent)
        return status


class OpenCodeTalk(HarnessTalk):
    async def ask(self) -> str:
        """Ask, and append the answer as opencode keeps it. Returns its text."""
        body = {"model": "m", "max_tokens": 300, "tools": [OPENCODE_TOOL], "messages": self.messages, **self.fields}
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]
        kept = {"role": "assistant", "content": said["content"] or ""}
        self.messages.append(kept | ({"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}))
        return said["content"] or ""

    async def work(self, rounds: int) -> None:
        """Run the commands that the model asks for."""
        for _ in range(rounds):
            calls = self.messages[-1]["tool_calls"]
            self.messages += [{"role": "tool", "tool_call_id": one["id"], "content": "file " * 60} for one in calls]
            await self.ask()


async def claude_compacts(http: httpx.AsyncClient) -> None:
    """A request of more tokens than the model takes gets status 400; Claude Code summarizes, and keeps the latest."""
    talk = ClaudeTalk(http, ClaudeTalk.says(REMINDER, "Repair it."))
    status = await talk.ask()
    while status == 200:
        status = await talk.work(1)
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
    assert (await again.ask(), await again.work(2)) == (200, 200)


async def claude_clears(http: httpx.AsyncClient) -> None:
    """A new conversation under the same opening."""
    for opening in (("Repair it.",), ("<command-name>/clear</command-name>", "<local-command-stdout>", "Test it.")):
        talk = ClaudeTalk(http, ClaudeTalk.says(REMINDER, *opening))
        await talk.ask()
        assert await talk.work(4) == 200


async def claude_forks(http: httpx.AsyncClient) -> None:
    """Two sub-agents at once, whose turns read alike. Each goes on with its own."""

    async def explore(agent: str) -> None:
        talk = ClaudeTalk(http, ClaudeTalk.says(REMINDER, f"Look into {agent}."))
        assert (await talk.ask(agent), await talk.work(3, agent)) == (200, 200)

    main = ClaudeTalk(http, ClaudeTalk.says(REMINDER, "Repair it."))
    assert (await main.ask(), await main.work(1)) == (200, 200)
    await asyncio.gather(explore("a1"), explore("b2"))
    assert await main.work(2) == 200


async def opencode_compacts(http: httpx.AsyncClient) -> None:
    """A summary by an agent without tools replaces the conversation."""
    system = {"role": "system", "content": "You are opencode."}
    talk = OpenCodeTalk(http, system, {"role": "user", "content": "Repair it."})
    await talk.ask()
    await talk.work(4)
    said = "\n".join(str(message["content"]) for message in talk.messages[1:])
    summarizer = {"role": "system", "content": "You are a context summarization agent."}
    asked = OpenCodeTalk(http, summarizer, {"role": "user", "content": f"<conversation>\n{said}"}, tools=[])
    summary = {"role": "assistant", "content": await asked.ask()}
    question = {"role": "user", "content": "What did we do so far?"}
    go_on = {"role": "user", "content": "Continue if you have next steps."}
    again = OpenCodeTalk(http, system, question, summary, go_on)
    await again.ask()
    await again.work(3)


async def opencode_prunes(http: httpx.AsyncClient) -> None:
    """Old results of tools lose their text, in the place where they stand."""
    talk = OpenCodeTalk(
        http, {"role": "system", "content": "You are opencode."}, {"role": "user", "content": "Repair it."}
    )
    await talk.ask()
    await talk.work(4)
    for message in talk.messages[2:8]:
        if message["role"] == "tool":
            message["content"] = "[Old tool result content cleared]"
    await talk.work(3)


ROWS = {claude_compacts: 3, claude_clears: 2, claude_forks: 3, opencode_compacts: 3, opencode_prunes: 2}
"""Kind of editing -> the fewest rows that its requests allow."""


def working(prompt: str) -> str:
    """What the model says: the same each time, but where it is asked to sum up."""
    if "detailed summary" in prompt.rsplit("<|im_start|>user", 1)[-1] or "summarization agent" in prompt:
        return "<summary>half done</summary>"
    return call("Bash" if "a Claude agent" in prompt else "bash", command="ls")


@pytest.mark.parametrize("edits", ROWS, ids=lambda edits: edits.__name__)
async def test_every_branch_trains_in_as_few_rows_as_the_requests_allow(edits: Any, tiny: SimpleNamespace) -> None:
    async with talking(misspelling(tiny, working), max_context_tokens=CONTEXT_TOKENS, max_turn_tokens=300) as talk:
        await edits(talk.http)
        record = await talk.close()
    compacts = edits in (claude_compacts, opencode_compacts)
    assert len(rows_of_calls(record.calls)) == ROWS[edits]
    assert [call.side for call in record.calls if call.side] == (["summary"] if compacts else [])
    assert {call.agent for call in record.calls} == ({"main", "a1", "b2"} if edits is claude_forks else {"main"})
    assert dict(record.refused) == ({400: 1} if edits is claude_compacts else {})
