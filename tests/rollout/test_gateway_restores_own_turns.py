"""Reasoning that clients drop comes back, and what is remembered of it is what a look-up would find."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.rollout.gateway import own_turns
from tree_rl.rollout.gateway.messages import KEPT, ChatMessage
from tree_rl.rollout.gateway.own_turns import OwnTurns


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def said(text: str, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, reasoning=reasoning)


def test_a_message_has_another_key_behind_another_history() -> None:
    messages = [ChatMessage(role=role, content="so") for role in ("user", "assistant", "user", "assistant")]
    turns = OwnTurns()
    known = turns.restore(messages)[1]
    assert len(set(known)) == 4
    longer = [*messages, user("so")]
    assert turns.restore(longer)[1][:4] == known
    changed = [messages[0], said("no"), *messages[2:]]
    same = [one == other for one, other in zip(turns.restore(changed)[1], known, strict=True)]
    assert same == [True, False, False, False]
    assert turns.restore(longer) == OwnTurns().restore(longer)


def test_the_latest_of_equal_answers_comes_back_even_if_an_earlier_one_was_found() -> None:
    turns, asked = OwnTurns(), [user("q")]
    turns.add(turns.restore(asked)[1], said("a", "first"))
    longer = [*asked, said("a"), user("r")]
    assert turns.restore(longer)[0][1].reasoning == "first"
    turns.add(turns.restore(asked)[1], said("a", "second"))
    assert turns.restore(longer)[0][1].reasoning == "second"


def test_an_answer_that_the_agent_made_up_first_is_found_once_the_model_gives_it() -> None:
    turns, asked = OwnTurns(), [user("q")]
    longer = [*asked, said("a"), user("r")]
    assert turns.restore(longer)[0] == tuple(longer)
    turns.add(turns.restore(asked)[1], said("a", "why"))
    assert turns.restore(longer)[0][1].reasoning == "why"


def test_only_new_messages_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[ChatMessage] = []
    key_after = own_turns.key_after

    def counting(keys: Any, message: ChatMessage) -> bytes:
        looked_at.append(message)
        return key_after(keys, message)

    monkeypatch.setattr(own_turns, "key_after", counting)
    turns = OwnTurns()
    for agent in range(2 * KEPT):
        messages = [user(str(agent))]
        for number in range(10):
            looked_at.clear()
            keys = turns.restore(messages)[1]
            assert len(looked_at) == (2 if number else 1)
            turns.add(keys, said(f"a{number}", "why"))
            messages += [said(f"a{number}"), user("so")]
    assert len(turns._recent) == KEPT


MESSAGES = [user("q"), user("r"), *(said(text, why) for text in ("a", "a ", "b") for why in (None, "", "x", "y"))]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(MESSAGES)),
        st.tuples(st.just("cut"), st.integers(1, 6)),
        st.tuples(st.just("answer"), st.sampled_from([one for one in MESSAGES if one.role == "assistant"])),
        st.tuples(st.just("copy"), st.integers(0, 6)),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(STEPS)
def test_what_is_remembered_is_what_a_look_up_finds(steps: list[tuple[str, Any]]) -> None:
    turns, forgetful = OwnTurns(), OwnTurns()
    messages: list[ChatMessage] = [MESSAGES[0]]
    for kind, value in steps:
        match kind:
            case "append":
                messages = [*messages, value]
            case "cut":
                messages = messages[:value]
            case "copy":  # an equal message, but another object
                place = value % len(messages)
                one = messages[place]
                copied = ChatMessage(role=one.role, content=one.content, reasoning=one.reasoning)
                messages = [*messages[:place], copied, *messages[place + 1 :]]
        forgetful._recent = []
        restored, keys = turns.restore(messages)
        assert (restored, keys) == forgetful.restore(messages)
        if kind == "answer":
            turns.add(keys, value)
            forgetful.add(keys, value)
            messages = [*messages, said(value.content)]
