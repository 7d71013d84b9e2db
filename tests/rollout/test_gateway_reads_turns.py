"""What a generated turn says: reasoning, text and tool calls, also where the model wrote them badly."""

from typing import Any

import pytest
from gateway_harness import SHELL

from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.turn_reading import read_message

CALL = '<tool_call>{"name": "x"}</tool_call>'


def read(text: str, **options: Any) -> ChatMessage:
    settings: dict[str, Any] = {"tools": [SHELL], "is_reasoning_open": False, "reasoning": "field", "key": "s_0"}
    return read_message(text, **{**settings, **options})[0]


@pytest.mark.parametrize(
    ("turn", "text", "calls"),
    [
        ("hi", "hi", []),
        ("<think><tool_call>{}</tool_call></think>hi", "hi", []),
        ("<think>never closed <tool_call>{}</tool_call>", "", []),
        (f"a{CALL}b", "ab", [("x", {})]),
        (
            f'{CALL} and\n<tool_call>\n{{"name": "y", "arguments": {{"n": 1}}}}\n</tool_call>',
            "and",
            [("x", {}), ("y", {"n": 1})],
        ),
        ('<tool_call>{"name": 3}</tool_call><tool_call>[]</tool_call>', None, []),
        ('<tool_call>{"name": "x", "arguments": "y"}</tool_call>', None, []),
        (f"{CALL}<tool_call>{{</tool_call>", None, []),
        (f"{CALL}<tool_call>", "<tool_call>", [("x", {})]),
        (f"a <think> b{CALL}", None, []),
        (f"{CALL} a <think> b{CALL}", "a", [("x", {})]),
    ],
)
def test_text_and_calls_of_a_turn(turn: str, text: str | None, calls: list[Any]) -> None:
    """A turn with a call that cannot be read is text alone, as the model wrote it (text None)."""
    message = read(turn)
    assert message.content == (turn if text is None else text)
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    assert [call.id for call in message.tool_calls] == [f"call_s_0_{index}" for index in range(len(calls))]


@pytest.mark.parametrize(
    ("turn", "is_open", "expected"),
    [
        ("hi", False, (None, "hi")),
        ("<think>\na\n</think>\n\nhi", False, ("a", "hi")),
        ("a</think>hi", True, ("a", "hi")),
        ("never closed", True, ("never closed", "")),
        (" <think>never closed", False, ("never closed", "")),
        ("a</think>b</think>c", True, ("a</think>b", "c")),
    ],
)
def test_reasoning_is_split_off(turn: str, is_open: bool, expected: tuple[str | None, str]) -> None:
    message = read(turn, is_reasoning_open=is_open)
    assert (message.reasoning, message.content) == expected
    assert read(turn, is_reasoning_open=is_open, reasoning="inline").content == turn
