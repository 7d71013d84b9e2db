"""Reasoning that clients drop comes back, and only behind the same history."""

from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.message_keys import joined_key, key_alone
from tree_rl.rollout.gateway.tokens.own_turns import OwnTurns


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def said(text: str, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, reasoning=reasoning)


def keys(messages: list[ChatMessage]) -> list[bytes]:
    found = [b""]
    for message in messages:
        found.append(joined_key(found[-1], key_alone(message)))
    return found[1:]


def test_a_message_has_another_key_behind_another_history() -> None:
    messages = [ChatMessage(role=role, content="so") for role in ("user", "assistant", "user", "assistant")]
    known = keys(messages)
    assert len(set(known)) == 4
    found = OwnTurns().restore(messages)
    assert (found.messages, found.key) == (tuple(messages), known[-1])
    assert not any((found.own_calls, found.guessed, found.edited, found.moved, found.unclear))
    assert keys([*messages, user("so")])[:4] == known
    changed = keys([messages[0], said("no"), *messages[2:]])
    assert [one == other for one, other in zip(changed, known, strict=True)] == [True, False, False, False]


def test_a_key_tells_apart_what_reads_alike_when_joined() -> None:
    def called(name: str, arguments: object) -> ChatMessage:
        call = CalledTool(id="c", name=name, arguments=arguments)  # type: ignore[arg-type]
        return ChatMessage(role="assistant", tool_calls=(call,))

    different = [
        *(user("ab"), user("b"), user("b "), said("ab"), said("b"), ChatMessage(role="usera", content="b")),
        *(
            called("a", "b"),
            called("ab", ""),
            called("a", {"n": 1}),
            called("a", {"n": True}),
            called("a", {"n": 1.5}),
            called("a", {"n": "1"}),
        ),
    ]
    assert len({key_alone(message) for message in different}) == len(different)
    assert key_alone(called("a", {"n": 1, "m": 2})) == key_alone(called("a", {"m": 2, "n": 1}))
    for one, other in ((1, 1.0), (-0.0, 0), (12345678901234567890, 12345678901234567000), (1e21, 10**21)):
        assert key_alone(called("a", {"n": [one]})) == key_alone(called("a", {"n": [other]}))
    assert key_alone(said("b")) == key_alone(said(" b\n"))


def test_a_message_that_comes_back_is_kept_once() -> None:
    turns = OwnTurns()
    first = turns.restore([user("".join("so"))]).messages
    again = turns.restore([user("".join("so")), said("a")]).messages
    assert again[0] is first[0]
    tool, other = (ChatMessage(role="tool", content="so", tool_call_id=name) for name in "ab")
    assert turns.restore([tool]).messages == (tool,)
    assert turns.restore([other]).messages == (other,)


class Talk:
    """Own turns of one session, added in order."""

    def __init__(self) -> None:
        self.turns = OwnTurns()
        self.calls = 0

    def answer(self, behind: list[ChatMessage], message: ChatMessage, *, agent: str = "main") -> ChatMessage:
        self.turns.add(self.turns.restore(behind, agent=agent), message, agent=agent, call=self.calls)
        self.calls += 1
        return message

    def thoughts(self, messages: list[ChatMessage], *, agent: str = "main") -> list[str | None]:
        restored = self.turns.restore(messages, agent=agent).messages
        return [message.reasoning for message in restored if message.role == "assistant"]


def test_the_latest_of_equal_answers_comes_back_even_if_an_earlier_one_was_found() -> None:
    talk, asked = Talk(), [user("q")]
    talk.answer(asked, said("a", "first"))
    longer = [*asked, said("a"), user("r")]
    assert talk.thoughts(longer) == ["first"]
    talk.answer(asked, said("a", "second"))
    assert talk.thoughts(longer) == ["second"]
    assert talk.turns.restore(longer).guessed == [1]
    assert talk.thoughts([*asked, said("a", "first")]) == ["first"]
    assert talk.turns.restore([*asked, said("a", "first")]).guessed == []
    assert talk.thoughts([*asked, said("a", "third")]) == ["third"]


def test_an_answer_that_the_agent_made_up_first_is_found_once_the_model_gives_it() -> None:
    talk, asked = Talk(), [user("q")]
    longer = [*asked, said("a"), user("r")]
    assert talk.turns.restore(longer).messages == tuple(longer)
    talk.answer(asked, said("a", "why"))
    assert talk.thoughts(longer) == ["why"]


def test_siblings_are_told_apart_by_what_they_led_to() -> None:
    talk, asked = Talk(), [user("q")]
    talk.answer(asked, said("a", "first"))
    second = talk.answer([*asked, said("a", "first"), user("r")], said("left", "on the left"))
    talk.answer(asked, said("a", "other"))
    talk.answer([*asked, said("a", "other"), user("r")], said("right", "on the right"))
    sent = [*asked, said("a"), user("r"), said("left"), user("s")]
    assert talk.thoughts(sent) == ["first", second.reasoning]
    assert talk.thoughts([*sent[:3], said("right"), user("s")]) == ["other", "on the right"]
    assert talk.turns.restore(sent).guessed == []
