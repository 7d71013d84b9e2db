"""Each family's own chat template renders a recorded history byte for byte, and turns are read as it writes them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from client_edits import NEW_IDS, sent_back
from dictated_answers import Scene, said, user
from gateway_harness import misspell
from model_families import EDIT, TEMPLATES, Family, call, tokenizer_of, written_by_the_template

from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.template_form import conversation_of
from tree_rl.rollout.transcript import rows_of_calls


def scene_of(family: Family, path: Path, *, tools: Any = (EDIT,)) -> Scene:
    return Scene(tokenizer_of(family, path.read_text()), tools=tools)


def as_a_client_sends(message: ChatMessage) -> ChatMessage:
    """Through the OpenAI protocol, without reasoning."""
    return sent_back([replace(message, reasoning=None)], lambda forms: forms[0], "openai", NEW_IDS[0])[-1]


def results(message: ChatMessage) -> list[ChatMessage]:
    return [ChatMessage(role="tool", content=f"done {one.id}", tool_call_id=one.id) for one in message.tool_calls]


def play(scene: Scene, family: Family, reasoning: str | None) -> list[ChatMessage]:
    """Three turns with calls and an answer, each turn as the template writes it, in odd tokens."""

    def spell(text: str) -> list[int]:
        return misspell(scene.tokenizer, text)

    history = [user("q")]
    for number in range(3):
        calls = tuple(call(number, index) for index in range(1 + number % family.max_calls))
        meant = ChatMessage(role="assistant", tool_calls=calls, reasoning=reasoning)
        message = scene.answer(
            history, spell(written_by_the_template(scene, history, meant)), end=family.call_end or None
        )
        assert [(one.name, one.arguments) for one in message.tool_calls] == [(one.name, one.arguments) for one in calls]
        assert [list(one.arguments) for one in message.tool_calls] == [list(one.arguments) for one in calls]
        assert (message.reasoning or "").strip() == (reasoning or "")
        history += [as_a_client_sends(message), *results(message)]
    turn = written_by_the_template(scene, history, said("It is done."))
    history.append(as_a_client_sends(scene.answer(history, spell(turn), end=family.answer_end or None)))
    return history


@pytest.mark.parametrize(("family", "path"), TEMPLATES)
def test_history_is_rendered_byte_for_byte(family: Family, path: Path) -> None:
    """A prompt spells what transformers renders, and a tool loop is one row though the client drops reasoning.

    Misspelt turns keep their ids.
    """
    scene = scene_of(family, path)
    assert scene.renderer.dialect.name == family.dialect
    reasoning = None if scene.renderer._form.reasoning_field is None else "I look\nfirst."
    *history, _ = play(scene, family, reasoning)
    prompt = scene.prompt(*history)
    calls = scene.recorder.calls
    form = conversation_of(prompt.restored.messages, scene.renderer._form, scene.renderer.dialect)
    expected = scene.tokenizer.apply_chat_template(form, tools=[EDIT], tokenize=False, add_generation_prompt=True)
    assert scene.tokenizer.decode(prompt.ids) == expected
    assert len(rows_of_calls(calls[:3])) == 1
    for earlier, later in zip(calls[:3], [*(one.prompt_ids for one in calls[1:3]), prompt.ids], strict=True):
        drawn = earlier.prompt_ids + earlier.response_ids[:-1]
        assert later[: len(drawn)] == drawn
    report = scene.recorder.drift_report()
    assert report.unread == report.branch_causes == {}


@pytest.mark.parametrize(("family", "path"), TEMPLATES)
def test_a_later_system_message_is_part_of_the_conversation(family: Family, path: Path) -> None:
    """It changes nothing in front of it, whatever the template allows."""
    scene = scene_of(family, path, tools=())
    history = [user("q")]
    message = scene.answer(history, written_by_the_template(scene, history, said("a")), end=family.answer_end or None)
    told = ChatMessage(role="system", content="a later rule")
    prompt = scene.prompt(*history, as_a_client_sends(message), told, user("and"))
    first = scene.recorder.calls[0]
    assert prompt.ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "a later rule" in scene.tokenizer.decode(prompt.ids[len(first.prompt_ids) :])
    assert scene.recorder.drift_report().branch_causes == {}
