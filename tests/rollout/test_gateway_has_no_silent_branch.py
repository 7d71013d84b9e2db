"""An answer that comes back as it was given continues its row; whatever branches is reported with its cause."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from dictated_answers import Scene, said, user
from gateway_harness import SHELL

from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.transcript import rows_of_calls

CALL = '<tool_call>\n{"name":"shell",  "arguments":{"command": "ls %d"}}\n</tool_call>'
EMPTY = "<think>\n\n</think>\n\n"


def result(message: ChatMessage, number: int) -> ChatMessage:
    return ChatMessage(role="tool", content=f"file {number}", tool_call_id=message.tool_calls[0].id)


def as_a_client_sends(message: ChatMessage) -> ChatMessage:
    """Through JSON and without reasoning."""
    calls = tuple(
        CalledTool(id=call.id, name=call.name, arguments=json.loads(call.arguments_json)) for call in message.tool_calls
    )
    return ChatMessage(role="assistant", content=message.content, tool_calls=calls)


def rows(scene: Scene) -> list[Any]:
    return rows_of_calls(scene.recorder.calls)


@pytest.mark.parametrize("opening", ["", EMPTY, "<think>\n</think>\n", "\n", "I look. "])
@pytest.mark.parametrize("template_options", [{}, {"enable_thinking": False}])
def test_calls_without_reasoning_are_one_row(
    tiny: SimpleNamespace, opening: str, template_options: dict[str, Any]
) -> None:
    scene = Scene(tiny.tokenizer, tools=(SHELL,), template_options=template_options)
    history = [user("q")]
    for number in range(6):
        message = scene.answer(history, opening + CALL % number)
        assert message.tool_calls
        history += [as_a_client_sends(message), result(message, number)]
    assert len(rows(scene)) == 1
    assert scene.recorder.drift_report().left == ()


@pytest.mark.parametrize("template_options", [{}, {"enable_thinking": False}])
def test_answers_without_reasoning_are_one_row(tiny: SimpleNamespace, template_options: dict[str, Any]) -> None:
    scene = Scene(tiny.tokenizer, template_options=template_options)
    history = [user("q")]
    for text in ("the forest", " segments\n", EMPTY + "tree", "a\n\nb", "tokens"):
        message = scene.answer(history, text)
        history += [as_a_client_sends(message), user("and")]
    scene.prompt(*history)
    assert len(rows(scene)) == 1
    assert scene.recorder.drift_report().left == ()


def test_reasoning_in_a_tool_loop_is_one_row_however_it_is_spaced(tiny: SimpleNamespace) -> None:
    scene = Scene(tiny.tokenizer, tools=(SHELL,))
    history = [user("q")]
    for number, space in enumerate(("\n", " ", "\n\n  ", "")):
        message = scene.answer(history, f"<think>{space}look {number}{space}</think>{space}{CALL % number}")
        assert message.reasoning is not None and message.tool_calls
        history += [as_a_client_sends(message), result(message, number)]
    assert len(rows(scene)) == 1
    assert scene.recorder.drift_report().left == ()


def test_reasoning_that_the_template_drops_is_a_named_branch(tiny: SimpleNamespace) -> None:
    scene = Scene(tiny.tokenizer)
    message = scene.answer([user("q")], "<think>\nlook\n</think>\n\nthe forest")
    scene.answer([user("q"), as_a_client_sends(message), user("and")], "tree")
    scene.prompt(user("q"), as_a_client_sends(message), user("and"))
    assert len(rows(scene)) == 2
    (left,) = scene.recorder.drift_report().left
    assert (left.session, left.call, left.cause) == ("s", 0, "reasoning_dropped")


def test_an_edit_and_a_changed_beginning_are_named_branches(tiny: SimpleNamespace) -> None:
    scene = Scene(tiny.tokenizer)
    first = scene.answer([user("q")], "the forest")
    scene.answer([user("q"), first, user("and")], "tree")
    scene.answer([user("q"), said("the fores"), user("and")], "tree")
    scene.tools = (SHELL,)
    scene.answer([user("q"), first, user("and"), said("tree"), user("so")], "tokens")
    assert [(left.call, left.cause) for left in scene.recorder.drift_report().left] == [(0, "edited")]
    other = Scene(tiny.tokenizer)
    first = other.answer([user("q")], "the forest")
    other.tools = (SHELL,)
    other.answer([user("q"), first, user("and")], "tree")
    assert [(left.call, left.cause) for left in other.recorder.drift_report().left] == [(0, "rewritten")]


def test_siblings_with_equal_text_go_on_in_their_own_branches(tiny: SimpleNamespace) -> None:
    scene = Scene(tiny.tokenizer, tools=(SHELL,))
    turns = [f"<think>\nthought {number}\n</think>\n\n{CALL % 0}" for number in range(3)]
    messages = [scene.answer([user("q")], turn) for turn in turns]
    for number, message in enumerate(messages):
        scene.answer([user("q"), as_a_client_sends(message), result(message, 0)], f"done {number}")
    found = rows(scene)
    assert len(found) == 3
    texts = [scene.tokenizer.decode(row.prompt_ids + row.response_ids) for row in found]
    for number in range(3):
        (text,) = [text for text in texts if f"done {number}" in text]
        assert f"thought {number}" in text
    assert scene.recorder.drift_report().guessed == ()
