"""Reasoning that clients drop comes back, and only behind the same history."""

from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.own_turns import OwnTurns, key_after


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def said(text: str, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, reasoning=reasoning)


def keys(messages: list[ChatMessage]) -> list[bytes]:
    found = [b""]
    for message in messages:
        found.append(key_after(found[-1], message))
    return found[1:]


def test_a_message_has_another_key_behind_another_history() -> None:
    messages = [ChatMessage(role=role, content="so") for role in ("user", "assistant", "user", "assistant")]
    known = keys(messages)
    assert len(set(known)) == 4
    assert OwnTurns().restore(messages) == (tuple(messages), known[-1])
    assert keys([*messages, user("so")])[:4] == known
    changed = keys([messages[0], said("no"), *messages[2:]])
    assert [one == other for one, other in zip(changed, known, strict=True)] == [True, False, False, False]


def test_a_key_tells_apart_what_reads_alike_when_joined() -> None:
    def called(name: str, arguments: object) -> ChatMessage:
        call = CalledTool(id="c", name=name, arguments=arguments)  # type: ignore[arg-type]
        return ChatMessage(role="assistant", tool_calls=(call,))

    different = [
        *(user("ab"), user("b"), user("b "), said("ab"), said("b"), ChatMessage(role="usera", content="b")),
        *(called("a", "b"), called("ab", ""), called("a", {"n": 1}), called("a", {"n": True}), called("a", {"n": 1.0})),
    ]
    assert len({key_after(b"", message) for message in different}) == len(different)
    assert key_after(b"", called("a", {"n": 1, "m": 2})) == key_after(b"", called("a", {"m": 2, "n": 1}))
    assert key_after(b"", said("b")) == key_after(b"", said(" b\n"))


def test_a_message_that_comes_back_is_kept_once() -> None:
    turns = OwnTurns()
    first, _ = turns.restore([user("".join("so"))])
    again, _ = turns.restore([user("".join("so")), said("a")])
    assert again[0] is first[0]
    tool, other = (ChatMessage(role="tool", content="so", tool_call_id=name) for name in "ab")
    assert turns.restore([tool])[0] == (tool,)
    assert turns.restore([other])[0] == (other,)


def test_the_latest_of_equal_answers_comes_back_even_if_an_earlier_one_was_found() -> None:
    turns, asked = OwnTurns(), [user("q")]
    turns.add(turns.restore(asked)[1], said("a", "first"))
    longer = [*asked, said("a"), user("r")]
    assert turns.restore(longer)[0][1].reasoning == "first"
    turns.add(turns.restore(asked)[1], said("a", "second"))
    assert turns.restore(longer)[0][1].reasoning == "second"
    assert turns.restore([*asked, said("a", "first")])[0][1].reasoning == "first"
    assert turns.restore([*asked, said("a", "third")])[0][1].reasoning == "third"


def test_an_answer_that_the_agent_made_up_first_is_found_once_the_model_gives_it() -> None:
    turns, asked = OwnTurns(), [user("q")]
    longer = [*asked, said("a"), user("r")]
    assert turns.restore(longer)[0] == tuple(longer)
    turns.add(turns.restore(asked)[1], said("a", "why"))
    assert turns.restore(longer)[0][1].reasoning == "why"
