"""An answer that comes back in another form continues its row. The oracle is the list of generated tokens.

Each family's own chat template renders a recorded history byte for byte, and turns are read as it writes them.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_edits import NEW_IDS, chooser, sent_back
from dictated_answers import Scene, said, user
from gateway_harness import SHELL, misspell
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_families import EDIT, TEMPLATES, Family, call, tokenizer_of, written_by_the_template

from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.template_form import conversation_of
from tree_rl.rollout.transcript import rows_of_calls

QUICK = settings(
    phases=[Phase.generate], max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SPACES = st.sampled_from(["", "\n", " ", "\n\n", "  \n"])
ARGUMENTS = st.sampled_from(
    [
        '{"command": "ls"}',
        '{"command":"ls",   "n":1.0}',
        '{"n": 1e3, "command": "é \\u00e9 \\n\\t\\"", "m": [1, 2.50, {"b": 1, "a": null}]}',
        '{"command": "", "n": 12345678901234567890, "m": -0.0, "k": true}',
        "{}",
    ]
)


@st.composite
def turns(draw: Any) -> tuple[str, str, bool]:
    """What the model writes, its reasoning without white space, and whether it calls."""
    thought = draw(st.sampled_from([None, None, "", "I look", "one\n\ntwo ü"]))
    written = "" if thought is None else f"<think>{draw(SPACES)}{thought}{draw(SPACES)}</think>{draw(SPACES)}"
    calls = draw(st.lists(ARGUMENTS, max_size=2))
    written += draw(st.sampled_from(["", "Now.", " so \n", "a\n\nb"]))
    for one in calls:
        written += f'{draw(SPACES)}<tool_call>\n{{"name":"shell",  "arguments":{one}}}\n</tool_call>'
    return written, thought or "", bool(calls)


def continues(scene: Scene, prompts: list[tuple[int, ...]]) -> bool:
    """Whether every prompt holds all that the call before it was given and drew, its end token aside."""
    drawn = [one.prompt_ids + one.response_ids[:-1] for one in scene.recorder.calls]
    return all(later[: len(before)] == before for before, later in zip(drawn, prompts, strict=True))


@given(said=st.lists(turns(), min_size=1, max_size=4), data=st.data())
@settings(QUICK, max_examples=25)
@pytest.mark.parametrize("protocol", ["openai", "anthropic"])
def test_forms_of_a_client_continue_the_row(tiny: SimpleNamespace, protocol: str, said: Any, data: Any) -> None:
    scene = Scene(tiny.tokenizer, tools=(SHELL,))
    choose, new_id = chooser(data), data.draw(st.sampled_from(NEW_IDS))
    history, prompts, drops = [user("q")], [], False
    open_thoughts = False
    for number, (written, thought, calls) in enumerate(said):
        message = scene.answer(
            sent_back(history, choose, protocol, new_id), misspell(tiny.tokenizer, written, seed=number)
        )
        prompts.append(scene.recorder.calls[-1].prompt_ids)
        assert bool(message.tool_calls) == calls and (message.reasoning or "").strip() == thought
        open_thoughts |= bool(thought)
        # The template drops the reasoning of a turn once a question follows.
        drops |= open_thoughts and not calls
        history += [message, *answers_to(message)]
    prompts.append(scene.prompt(*sent_back(history, choose, protocol, new_id)).ids)
    report = scene.recorder.drift_report()
    if drops:
        assert set(report.branch_causes.values()) == {"reasoning_dropped"}
    else:
        assert continues(scene, prompts[1:]) and len(rows_of_calls(scene.recorder.calls)) == 1
        assert report.branch_causes == {}
    assert report.guessed == () and report.unread == {}


@cache
def tokenizer_with(family: Family, path: Path) -> Any:
    return tokenizer_of(family, path.read_text())


def answers_to(message: ChatMessage) -> list[ChatMessage]:
    results = [ChatMessage(role="tool", content=f"of {one.id}", tool_call_id=one.id) for one in message.tool_calls]
    return results or [user("and")]


@given(data=st.data())
@settings(QUICK, max_examples=6)
@pytest.mark.parametrize(("family", "path"), TEMPLATES)
def test_forms_of_a_client_continue_the_row_under_every_template(family: Family, path: Path, data: Any) -> None:
    scene = Scene(tokenizer_with(family, path), tools=(EDIT,))
    protocol = data.draw(st.sampled_from(["openai", "anthropic"]))
    keeps_reasoning = scene.renderer._form.reasoning_field is not None
    choose, new_id = chooser(data), data.draw(st.sampled_from(NEW_IDS))
    history, prompts = [user("q")], []
    for number in range(3):
        calls = tuple(call(number, index) for index in range(data.draw(st.integers(1, family.max_calls))))
        thought = data.draw(st.sampled_from([None, "I think.\nTwice."])) if keeps_reasoning else None
        meant = ChatMessage(role="assistant", tool_calls=calls, reasoning=thought)
        before = list(scene.prompt(*sent_back(history, choose, protocol, new_id)).restored.messages)
        written = misspell(scene.tokenizer, written_by_the_template(scene, before, meant), seed=number)
        message = scene.answer(sent_back(history, choose, protocol, new_id), written, end=family.call_end or None)
        prompts.append(scene.recorder.calls[-1].prompt_ids)
        assert len(message.tool_calls) == len(calls)
        history += [message, *answers_to(message)]
    prompts.append(scene.prompt(*sent_back(history, choose, protocol, new_id)).ids)
    assert scene.recorder.drift_report().branch_causes == {}
    assert continues(scene, prompts[1:]) and len(rows_of_calls(scene.recorder.calls)) == 1


@pytest.mark.parametrize("shown", ["ids", "agents", "thoughts", "nothing"])
@given(data=st.data(), order=st.permutations(range(3)))
@QUICK
def test_equal_siblings_go_on_in_branches_of_their_own(
    tiny: SimpleNamespace, shown: str, data: Any, order: Any
) -> None:
    """Three answers with equal text and calls and other thoughts, asked for at once; a client continues each."""
    scene = Scene(tiny.tokenizer, tools=(SHELL,))
    choose = chooser(data)
    agents = [f"agent {number}" if shown == "agents" else "main" for number in range(3)]
    body = (
        data.draw(st.sampled_from(["", "Now."]))
        + '<tool_call>\n{"name": "shell", "arguments": {"n": 1.0}}\n</tool_call>'
    )
    given = [
        scene.answer([user("q")], f"<think>\nthought {number}\n</think>\n\n{body}", agent=agents[number])
        for number in range(3)
    ]
    new_id = NEW_IDS[0] if shown == "ids" else NEW_IDS[2]
    for number in order:
        reply = ChatMessage(role="tool", content=f"result {number}", tool_call_id=given[number].tool_calls[0].id)
        history = [user("q"), given[number], reply]
        if shown != "thoughts":
            history[1] = ChatMessage(
                role="assistant", content=given[number].content, tool_calls=given[number].tool_calls
            )
        else:
            choose = lambda forms: forms[-1]  # noqa: E731 (the reasoning is kept)
        for _ in range(2):  # once more, as a client that was cut off
            scene.answer(sent_back(history, choose, "openai", new_id), f"done {number}", agent=agents[number])
    rows = rows_of_calls(scene.recorder.calls)
    texts = [tiny.tokenizer.decode(row.token_ids) for row in rows]
    assert {text.count("thought") for text in texts} == {1}
    pairs = {(text.split("thought ")[1][0], text.split("result ")[1][0]) for text in texts}
    assert len(pairs) == 3 and len({thought for thought, _ in pairs}) == 3, "no branch holds another's tokens"
    guessed = scene.recorder.drift_report().guessed
    if shown == "nothing":
        assert guessed
    else:
        assert guessed == () and all(thought == result for thought, result in pairs)


@pytest.mark.parametrize("opening", ["", "<think>\n\n</think>\n\n", "\n", "I look. "])
def test_calls_without_reasoning_are_one_row_where_thinking_is_off(tiny: SimpleNamespace, opening: str) -> None:
    scene = Scene(tiny.tokenizer, tools=(SHELL,), template_options={"enable_thinking": False})
    history = [user("q")]
    for number in range(4):
        written = f'<tool_call>\n{{"name":"shell",  "arguments":{{"command": "ls {number}"}}}}\n</tool_call>'
        message = scene.answer(history, opening + written)
        history += [replace(message, reasoning=None), *answers_to(message)]
    assert len(rows_of_calls(scene.recorder.calls)) == 1 and scene.recorder.drift_report().branch_causes == {}


def as_a_client_sends(message: ChatMessage) -> ChatMessage:
    """Through the OpenAI protocol, without reasoning."""
    return sent_back([replace(message, reasoning=None)], lambda forms: forms[0], "openai", NEW_IDS[0])[-1]


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
        history += [as_a_client_sends(message), *answers_to(message)]
    turn = written_by_the_template(scene, history, said("It is done."))
    history.append(as_a_client_sends(scene.answer(history, spell(turn), end=family.answer_end or None)))
    return history


@pytest.mark.parametrize(("family", "path"), TEMPLATES)
def test_history_is_rendered_byte_for_byte(family: Family, path: Path) -> None:
    """A prompt spells what transformers renders, and a tool loop is one row though the client drops reasoning.

    Misspelt turns keep their ids.
    """
    scene = Scene(tokenizer_with(family, path), tools=(EDIT,))
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
    scene = Scene(tokenizer_with(family, path))
    history = [user("q")]
    message = scene.answer(history, written_by_the_template(scene, history, said("a")), end=family.answer_end or None)
    told = ChatMessage(role="system", content="a later rule")
    prompt = scene.prompt(*history, as_a_client_sends(message), told, user("and"))
    first = scene.recorder.calls[0]
    assert prompt.ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "a later rule" in scene.tokenizer.decode(prompt.ids[len(first.prompt_ids) :])
    assert scene.recorder.drift_report().branch_causes == {}
