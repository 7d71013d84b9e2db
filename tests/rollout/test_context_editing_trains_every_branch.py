"""Compaction, /clear, cleared results and sub-agents: every branch trains, in as few rows as the requests allow."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import edited_contexts
import httpx
import pytest
from gateway_harness import TinyModel, check_record, misspell

# From benchmarks/agents, which `edited_contexts` puts on the path.
from context_editing import CASES, play  # isort: skip
from heard_requests import HeardRequest, ListeningGateway  # isort: skip
from least_rows import least_rows  # isort: skip
from long_sessions import HARNESSES  # isort: skip
from long_sessions import play as play_together  # isort: skip

from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

ROWS = {"claude_compacts": 3, "claude_forks": 3, "opencode_prunes": 2}
"""Kind of editing -> rows."""
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


def played(
    backend: TinyModel, act: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> tuple[RecordedSession, list[HeardRequest]]:
    """A session's record, every token of which `check_record` finds trained, and its requests."""

    async def run() -> tuple[RecordedSession, list[HeardRequest]]:
        options = GatewayOptions(max_context_tokens=CONTEXT_TOKENS, max_turn_tokens=300)
        async with ListeningGateway(tokenizer=backend.tokenizer, backend=backend, options=options) as gateway:
            session = gateway.open_session(sampling={"temperature": 1.0})
            endpoint = gateway.endpoint(session)
            async with httpx.AsyncClient(base_url=endpoint.url, headers={"x-api-key": endpoint.token}) as http:
                await act(http)
            return await gateway.close_session(session), gateway.heard

    record, heard = asyncio.run(run())
    check_record(backend, record)
    return record, heard


@pytest.mark.parametrize("kind", ROWS)
def test_every_branch_trains_in_as_few_rows_as_the_requests_allow(kind: str, tiny: SimpleNamespace) -> None:
    record, heard = played(answering(tiny), getattr(edited_contexts, kind))
    assert len(rows_of_calls(record.calls)) == least_rows(heard) == ROWS[kind]
    assert [call.side for call in record.calls if call.side] == (["summary"] if "compacts" in kind else [])
    assert {call.agent for call in record.calls} == ({"main", "a1", "b2"} if kind == "claude_forks" else {"main"})
    assert dict(record.refused) == ({400: 1} if kind == "claude_compacts" else {})


def chat(*messages: tuple[str, Any], status: int = 200, **fields: Any) -> HeardRequest:
    """A request of chat completions; an answer's content may be a pair of text and arguments of a call."""

    def written(role: str, content: Any) -> dict[str, Any]:
        if isinstance(content, str):
            return {"role": role, "content": content}
        call = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": content[1]}}
        return {"role": role, "content": content[0], "tool_calls": [call]}

    body = {"messages": [written(*message) for message in messages], **fields}
    return HeardRequest(path="/s/1/v1/chat/completions", headers={}, body=body, status=status)


def anthropic(*messages: tuple[str, Any]) -> HeardRequest:
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return HeardRequest(path="/s/1/v1/messages", headers={}, body=body, status=200)


def responses(*items: dict[str, Any]) -> HeardRequest:
    return HeardRequest(path="/s/1/v1/responses", headers={}, body={"input": list(items)}, status=200)


def gemini(*parts: tuple[str, dict[str, Any]]) -> HeardRequest:
    body = {"contents": [{"role": role, "parts": [part]} for role, part in parts]}
    return HeardRequest(path="/s/1/v1beta/models/m:streamGenerateContent", headers={}, body=body, status=200)


ASKED = ("user", "a")
ANSWERED = (ASKED, ("assistant", "b"), ("user", "c"))
USED = {"type": "tool_use", "id": "1", "name": "shell", "input": {"x": 1, "y": 2}}
CALLED = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "1"}
REQUESTS: dict[str, tuple[int, list[HeardRequest]]] = {
    "a conversation": (1, [chat(ASKED), chat(*ANSWERED), chat(*ANSWERED, ("assistant", "d"), ("user", "e"))]),
    "white space around an answer": (
        1,
        [
            chat(ASKED),
            chat(*ANSWERED),
            chat(ASKED, ("assistant", " b\n"), ("user", "c"), ("assistant", "d"), ("user", "e")),
        ],
    ),
    "the same twice": (2, [chat(ASKED), chat(ASKED)]),
    "one answer goes on twice": (2, [chat(ASKED), chat(*ANSWERED), chat(ASKED, ("assistant", "b"), ("user", "d"))]),
    "an edited question": (2, [chat(ASKED), chat(("user", "A"), *ANSWERED[1:])]),
    "other tools": (2, [chat(ASKED), chat(*ANSWERED, tools=[{"name": "shell"}])]),
    "a refused request": (1, [chat(ASKED), chat(*ANSWERED, status=400)]),
    "arguments in another order": (
        1,
        [
            chat(ASKED),
            chat(ASKED, ("assistant", (None, '{"x": 1, "y": 2}')), ("tool", "r")),
            chat(ASKED, ("assistant", ("", '{"y":2,"x":1}')), ("tool", "r"), ("assistant", "d"), ("user", "e")),
        ],
    ),
    "Anthropic's blocks and text": (
        1,
        [
            anthropic(ASKED),
            anthropic(
                ("user", [{"type": "text", "text": "a"}]),
                ("assistant", [{"type": "thinking", "thinking": "t"}, USED]),
                ("user", [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]),
            ),
        ],
    ),
    "a cleared result": (
        2,
        [
            anthropic(ASKED),
            *(
                anthropic(
                    ASKED,
                    ("assistant", [USED]),
                    ("user", [{"type": "tool_result", "tool_use_id": "1", "content": content}]),
                )
                for content in ("r", "cleared")
            ),
        ],
    ),
    "items of one answer": (
        1,
        [
            responses({"type": "message", "role": "user", "content": "a"}),
            responses(
                {"type": "message", "role": "user", "content": "a"},
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                CALLED,
                {"type": "function_call_output", "call_id": "1", "output": "r"},
            ),
        ],
    ),
    "Gemini's parts": (
        1,
        [
            gemini(("user", {"text": "a"})),
            gemini(
                ("user", {"text": "a"}),
                ("model", {"functionCall": {"name": "shell", "args": {}}}),
                ("user", {"functionResponse": {"response": {"output": "r"}}}),
            ),
        ],
    ),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_least_number_of_rows_is_that_of_the_branches(kind: str) -> None:
    rows, requests = REQUESTS[kind]
    assert least_rows(requests) == rows
    assert least_rows(requests[::-1]) == rows


def test_a_history_at_the_server_is_refused() -> None:
    kept = HeardRequest(path="/v1/responses", headers={}, body={"previous_response_id": "r", "input": []}, status=200)
    with pytest.raises(ValueError, match="previous_response_id"):
        least_rows([kept])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_real_harness_that_edits_its_context_leaves_the_least_rows(name: str) -> None:
    try:
        line = asyncio.run(play(name, CASES[name]))
    except ValueError as error:
        pytest.skip(str(error))
    assert (line.ended, line.measured.differences) == ("completed", 0)
    assert 1 < line.measured.rows == line.measured.least_rows


@pytest.mark.slow
def test_five_harnesses_at_once_in_one_session_leave_the_least_rows() -> None:
    try:
        lines = asyncio.run(play_together(HARNESSES, steps=12))
    except ValueError as error:
        pytest.skip(str(error))
    for line in lines:
        assert (line["ended"], line["differences"]) == ("completed", 0), line
        assert line["rows"] == line["least_rows"], line
