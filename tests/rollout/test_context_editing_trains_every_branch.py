"""Compaction, /clear, cleared results and sub-agents: every branch trains, in as few rows as the requests allow."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import edited_contexts
import httpx
import pytest
from gateway_harness import TinyModel, check_record, misspell

from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

ROWS = {"claude_compacts": 3, "claude_clears": 2, "claude_forks": 3, "opencode_compacts": 3, "opencode_prunes": 2}
"""Kind of editing -> the fewest rows that its requests allow."""
CONTEXT_TOKENS = 1100


def answering(tiny: SimpleNamespace) -> TinyModel:
    """A model that says the same in other tokens each time, and sums up where it is asked to."""
    backend = tiny.backend()

    def script(prompt: str) -> list[int]:
        last = prompt.rsplit("<|im_start|>user", 1)[-1]
        asks_for_summary = "detailed summary" in last or "summarization agent" in prompt
        tool = "Bash" if "a Claude agent" in prompt else "bash"
        call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {'command': 'ls'}})}\n</tool_call>"
        written = "<summary>half done</summary>" if asks_for_summary else call
        return [*misspell(tiny.tokenizer, written, seed=len(backend.prompts)), tiny.tokenizer.eos_token_id]

    backend.script = script
    return backend


def played(backend: TinyModel, act: Callable[[httpx.AsyncClient], Awaitable[None]]) -> RecordedSession:
    """A session's record, every token of which `check_record` finds trained."""

    async def run() -> RecordedSession:
        options = GatewayOptions(max_context_tokens=CONTEXT_TOKENS, max_turn_tokens=300)
        async with Gateway(tokenizer=backend.tokenizer, backend=backend, options=options) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            async with httpx.AsyncClient(base_url=endpoint.url, headers={"x-api-key": endpoint.token}) as http:
                await act(http)
            return await gateway.close_session(session)

    record = asyncio.run(run())
    check_record(backend, record)
    return record


@pytest.mark.parametrize("kind", ROWS)
def test_every_branch_trains_in_as_few_rows_as_the_requests_allow(kind: str, tiny: SimpleNamespace) -> None:
    record = played(answering(tiny), getattr(edited_contexts, kind))
    assert len(rows_of_calls(record.calls)) == ROWS[kind]
    assert [call.side for call in record.calls if call.side] == (["summary"] if "compacts" in kind else [])
    assert {call.agent for call in record.calls} == ({"main", "a1", "b2"} if kind == "claude_forks" else {"main"})
    assert dict(record.refused) == ({400: 1} if kind == "claude_compacts" else {})
