"""An answer that comes back in another form continues its row. The oracle is the list of generated tokens.

Each family's own chat template renders a recorded history byte for byte, and turns are read as it writes them.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_edits import NEW_IDS, chooser, sent_back
from dictated_answers import Scene, said, user, without_reasoning
from gateway_harness import SHELL, misspell
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_families import EDIT, TEMPLATES, Family, call, tokenizer_of, written_by_the_template
from protocol_turns import call as written_call

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
    """Turns are misspelt and read as their template writes them; prompts spell what transformers renders."""
    scene = Scene(tokenizer_with(family, path), tools=(EDIT,))
    assert scene.renderer.dialect.name == family.dialect
    protocol = data.draw(st.sampled_from(["openai", "anthropic"]))
    keeps_reasoning = scene.renderer._form.reasoning_field is not None
    choose, new_id = chooser(data), data.draw(st.sampled_from(NEW_IDS))
    # Of a turn without reasoning a template may write other marks once it is not the last.
    thoughts = ["I think.\nTwice.", *data.draw(st.sampled_from([[], [None]]))] if keeps_reasoning else [None]
    history = [user("q")]
    for number in range(4):
        prompt, is_last = scene.prompt(*sent_back(history, choose, protocol, new_id)), number == 3
        before = list(prompt.restored.messages)
        form = conversation_of(before, scene.renderer._form, scene.renderer.dialect)
        expected = scene.tokenizer.apply_chat_template(form, tools=[EDIT], tokenize=False, add_generation_prompt=True)
        assert len(thoughts) > 1 or scene.tokenizer.decode(prompt.ids) == expected
        calls = tuple(call(number, index) for index in range(data.draw(st.integers(1, family.max_calls))))
        thought = data.draw(st.sampled_from(thoughts))
        meant = ChatMessage(role="assistant", tool_calls=calls, reasoning=thought)
        # A final answer is written behind calls without reasoning, which some templates drop in front of it.
        meant, before = (said("It is done."), without_reasoning(before)) if is_last else (meant, before)
        turn = written_by_the_template(scene, before, meant)
        end = (family.answer_end if is_last else family.call_end) or None
        sent = sent_back(history, choose, protocol, new_id)
        message = scene.answer(sent, misspell(scene.tokenizer, turn, seed=number), end=end)
        made, expected = (
            [(one.name, list(one.arguments.items())) for one in some] for some in (message.tool_calls, calls)
        )
        assert made == ([] if is_last else expected)
        assert is_last or (message.reasoning or "").strip() == (thought or "")
        history += [message, *answers_to(message)]
    report = scene.recorder.drift_report()
    assert report.unread == report.branch_causes == {}
    assert len(rows_of_calls(scene.recorder.calls)) == 1


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
    body = data.draw(st.sampled_from(["", "Now."])) + written_call("shell", n=1.0)
    given = [
        scene.answer([user("q")], f"<think>\nthought {number}\n</think>\n\n{body}", agent=agents[number])
        for number in range(3)
    ]
    new_id = NEW_IDS[0] if shown == "ids" else NEW_IDS[2]
    for number in order:
        reply = ChatMessage(role="tool", content=f"result {number}", tool_call_id=given[number].tool_calls[0].id)
        history = [user("q"), given[number], reply]
        if shown != "thoughts":
            history = without_reasoning(history)
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
        message = scene.answer(history, opening + written_call("shell", command=f"ls {number}").replace(": ", ":  "))
        history += [*without_reasoning([message]), *answers_to(message)]
    assert len(rows_of_calls(scene.recorder.calls)) == 1 and scene.recorder.drift_report().branch_causes == {}


@pytest.mark.parametrize(("family", "path"), TEMPLATES)
def test_a_later_system_message_is_part_of_the_conversation(family: Family, path: Path) -> None:
    """It changes nothing in front of it, whatever the template allows."""
    scene = Scene(tokenizer_with(family, path))
    history = [user("q")]
    message = scene.answer(history, written_by_the_template(scene, history, said("a")), end=family.answer_end or None)
    told = ChatMessage(role="system", content="a later rule")
    sent = sent_back(without_reasoning([*history, message]), lambda forms: forms[0], "openai", NEW_IDS[0])
    prompt = scene.prompt(*sent, told, user("and"))
    first = scene.recorder.calls[0]
    assert prompt.ids[: len(first.prompt_ids)] == first.prompt_ids
    assert "a later rule" in scene.tokenizer.decode(prompt.ids[len(first.prompt_ids) :])
    assert scene.recorder.drift_report().branch_causes == {}
