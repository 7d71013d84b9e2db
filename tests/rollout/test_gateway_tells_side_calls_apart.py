"""Side calls of harnesses are told apart, and train as their weight says; sub-agents keep their own names."""

from dataclasses import replace
from typing import Any

import pytest

from tree_rl.rollout.gateway.calls.agent_names import agent_of_headers
from tree_rl.rollout.gateway.calls.side_calls import KNOWN_SIDE_CALLS, side_call_of
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols.exchange import ChatRequest
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.transcript import ModelCall, rows_of_calls
from tree_rl.verl_plugin.agent_loops.prompt_forests import origin
from tree_rl.verl_plugin.agent_loops.session_outputs import figures_of_calls, provenance

TITLE = "You are a title generator. You output ONLY a thread title. Nothing else."
COMMIT = "You are an expert software engineer that generates concise, one-line Git commit messages based on the diffs."


def asked(system: str, question: str, *more: ChatMessage, **fields: Any) -> ChatRequest:
    start = (ChatMessage(role="system", content=system), ChatMessage(role="user", content=question))
    return ChatRequest(model="m", messages=(*start, *more), **fields)


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (asked(TITLE, "fix the bug"), "title"),
        (asked("Generate a concise, sentence-case title (3-7 words) that ...", "fix"), "title"),
        (asked(COMMIT, "diff"), "commit_message"),
        (
            asked("You are Claude Code", "Your task is to create a detailed summary of the conversation so far"),
            "summary",
        ),
        (asked("You are Codex", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff"), "summary"),
        (asked("You are the component that summarizes internal chat history", "x"), "summary"),
        (asked("You code.", "You are now acting as the memory extraction subagent. Analyze"), "memory"),
        (asked("", "Analyze *only* the content and structure of your immediately preceding response"), "next_speaker"),
        (asked("You code.", "generate a title for my page"), None),
        # A tool's result that quotes a harness is none of its calls.
        (asked("You code.", "go", ChatMessage(role="tool", content=TITLE)), None),
    ],
)
def test_known_harnesses_side_calls_have_names(sent: ChatRequest, name: str | None) -> None:
    found = side_call_of(KNOWN_SIDE_CALLS, sent)
    assert (found and found.name) == name


def test_options_come_first_and_weigh_known_ones() -> None:
    given = [
        {"name": "title", "weight": 0},
        {"name": "judge", "weight": 0.5, "headers": {"X-Purpose": "^judge"}, "agent": "critic-.*"},
    ]
    options = GatewayOptions(max_context_tokens=10, max_turn_tokens=5, side_calls=given)  # type: ignore[arg-type]
    calls = options.side_calls
    assert {one.weight for one in calls if one.name == "title"} == {0} and calls[0].name == "judge"
    assert GatewayOptions(max_context_tokens=10, max_turn_tokens=5, side_calls=calls) == options
    headers = {"x-purpose": "judge the answer"}
    assert side_call_of(calls, asked("", "", agent="critic-1", headers=headers)) is calls[0]
    assert side_call_of(calls, asked("", "", headers=headers)) is None


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, "main"),
        ({"x-claude-code-agent-id": "explore/1"}, "explore-1"),
        ({"x-session-id": "ses_1"}, "main"),
        ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, "ses_2"),
        ({"thread-id": "01a2"}, "main"),
        ({"thread-id": "01a3", "x-codex-parent-thread-id": "01a2", "x-openai-subagent": "collab_spawn"}, "01a3"),
    ],
)
def test_sub_agents_are_named_by_their_harnesses_headers(headers: dict[str, str], name: str) -> None:
    assert agent_of_headers(headers) == name


def test_a_title_of_weight_zero_is_counted_and_not_trained() -> None:
    work = ModelCall(prompt_ids=(1,), response_ids=(2,), log_probs=None)
    title = replace(work, prompt_ids=(3,), side="title", weight=0.0)
    calls = (work, title, replace(work, prompt_ids=(4,), agent="explorer"))
    assert [row.prompt_ids for row in rows_of_calls(calls)] == [(1,), (4,)]
    once = dict.fromkeys(("sub_agent_calls", "side_calls", "untrained_calls", "side_title"), 1.0)
    assert figures_of_calls(calls, ["memory", "title"]) == {**once, "agents": 2.0, "side_memory": 0.0}


def test_dumped_rows_name_who_asked() -> None:
    calls = (
        ModelCall(prompt_ids=(1,), response_ids=(3,), log_probs=None),
        ModelCall(prompt_ids=(1, 3, 4), response_ids=(5,), log_probs=None, agent="explorer", side="x", weight=0.5),
    )
    (row,) = rows_of_calls(calls)
    extra = {**provenance(row, calls), "response_weights": list(row.response_weights)}
    assert origin(extra) == {"agents": ("main", "explorer"), "sides": ("x",), "response_weights": (1.0, 0.0, 0.5)}
    assert origin({}) == {}
