"""Own turns get the reasoning back that clients drop, also behind a beginning that a client changed."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from client_edits import NEW_IDS as FORMS_OF_IDS
from client_edits import sent_back
from dictated_answers import Scene, said, user, without_reasoning
from gateway_harness import SHELL, build_tokenizer
from protocol_turns import shell, thinking

from tree_rl.rollout.gateway.endpoint import Endpoint
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.tokens.message_keys import joined_key, key_alone
from tree_rl.rollout.gateway.tokens.own_turns import OwnTurns
from tree_rl.rollout.transcript import rows_of_calls

History = list[ChatMessage]
KEEPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = [ChatMessage(role="system", content="It is 10:01."), user("Repair it.")]


def result(text: str, call: CalledTool) -> ChatMessage:
    return ChatMessage(role="tool", content=text, tool_call_id=call.id)


def thoughts(messages: tuple[ChatMessage, ...]) -> list[str | None]:
    return [one.reasoning and one.reasoning.strip() for one in messages if one.role == "assistant"]


def with_a_clock(history: History) -> History:
    return [replace(one, content=one.content.replace("10:01", "10:02")) for one in history]


def with_cleared_results(history: History) -> History:
    return [replace(one, content="[cleared]") if one.role == "tool" else one for one in history]


def with_a_reminder(history: History) -> History:
    return [replace(one, content=f"Be careful.\n{one.content}") if one.role == "user" else one for one in history]


def with_all(history: History) -> History:
    return with_a_clock(with_cleared_results(with_a_reminder(history)))


CHANGES = [with_a_clock, with_cleared_results, with_a_reminder, with_all]


def as_chat(history: History, new_id: Callable[[str], str]) -> History:
    return list(sent_back(history, lambda forms: forms[0], "openai", new_id))


def as_messages(history: History, new_id: Callable[[str], str]) -> History:
    told, rest = ([one for one in history if (one.role == "system") == is_system] for is_system in (True, False))
    return [*told, *sent_back(rest, lambda forms: forms[0], "anthropic", new_id)]


def turn(thought: str, command: int) -> str:
    return thinking(thought, shell(f"ls {command}"))


def worked(scene: Scene, *commands: int, thought: str = "thought", behind: History | None = None) -> History:
    """A tool loop of calls whose turns read alike but for their commands; behind others a client drops its thoughts."""
    history = list(behind or [OPENING[0], user(f"Look into {thought}.")])
    begun = sum(one.role == "assistant" for one in history)
    for number, command in enumerate(commands, begun):
        message = scene.answer(without_reasoning(history) if behind else history, turn(f"{thought} {number}", command))
        history += [message, result(f"file {number}", message.tool_calls[0])]
    return history


@pytest.fixture
def scene(tiny: SimpleNamespace) -> Scene:
    return Scene(tiny.tokenizer, tools=(SHELL,))


def thoughts_behind(scene: Scene, sent: History) -> list[str | None]:
    """The reasoning that turns get back which a client sends without."""
    return thoughts(scene.prompt(*without_reasoning(sent)).restored.messages)


def causes(scene: Scene) -> dict[int, str]:
    """Why calls have a branch of their own; no turn was guessed."""
    report = scene.recorder.drift_report()
    assert report.guessed == ()
    return report.branch_causes


NEW_IDS: list[Callable[[str], str]] = [*FORMS_OF_IDS, lambda old: ""]
CLIENTS = [as_chat, as_messages]


@pytest.mark.parametrize(
    ("change", "client", "new_id"),
    [
        (change, client, NEW_IDS[(row + 2 * column) % 4])
        for row, change in enumerate(CHANGES)
        for column, client in enumerate(CLIENTS)
    ],
)
def test_a_tool_loop_keeps_its_reasoning(
    scene: Scene, change: Callable[[History], History], client: Callable[..., History], new_id: Callable[[str], str]
) -> None:
    history = worked(scene, 0, 1)
    drawn = [(call.prompt_ids, call.response_ids) for call in scene.recorder.calls]
    prompt = scene.prompt(*client(without_reasoning(change(history)), new_id))
    assert thoughts(prompt.restored.messages) == ["thought 0", "thought 1"]
    text = scene.tokenizer.decode(prompt.ids)
    assert text.index("thought 0") < text.index("file 0" if "file 0" in text else "[cleared]") < text.index("thought 1")
    assert causes(scene) == {1 if change is with_cleared_results else 0: "rewritten"}
    assert [(call.prompt_ids, call.response_ids) for call in scene.recorder.calls] == drawn


@pytest.mark.parametrize("change", [with_a_clock, with_a_reminder, with_all])
def test_turns_without_calls_keep_their_reasoning(change: Callable[[History], History]) -> None:
    scene = Scene(build_tokenizer(KEEPS_REASONING))
    history = OPENING
    for number in range(3):
        message = scene.answer(history, thinking(f"thought {number}", "so"))
        history = [*history, message, user(f"and {number}")]
    assert thoughts_behind(scene, change(history)) == ["thought 0", "thought 1", "thought 2"]
    assert causes(scene) == {0: "rewritten"}


def test_a_session_goes_on_in_one_row_behind_the_changed_beginning(scene: Scene) -> None:
    worked(scene, 2, 3, 4, behind=with_a_clock(worked(scene, 0, 1)))
    assert len(rows_of_calls(scene.recorder.calls)) == 2 and list(causes(scene)) == [0]


def test_sub_agents_with_one_system_text_get_their_own_thoughts_back(scene: Scene) -> None:
    talks = {name: worked(scene, 0, 1, thought=name) for name in ("ants", "bees")}
    for name, history in talks.items():
        sent = as_chat(without_reasoning(with_a_clock(history)), lambda old: "call_0")
        assert thoughts_behind(scene, sent) == [f"{name} 0", f"{name} 1"]
    assert causes(scene) == {0: "rewritten", 2: "rewritten"}


def test_of_several_turns_that_fit_none_is_taken_and_all_is_counted(scene: Scene) -> None:
    message, _ = (scene.answer(OPENING, turn(f"thought {number}", 0)) for number in range(2))
    history = with_a_clock([*OPENING, message, result("file", message.tool_calls[0])])
    assert thoughts_behind(scene, as_chat(without_reasoning(history), lambda old: "call_0")) == [None]
    report = scene.recorder.drift_report()
    assert report.guessed == (1,) and report.branch_causes == {1: "rewritten"}
    # The client's own ids tell.
    assert thoughts_behind(scene, history) == ["thought 0"]


def test_ids_that_a_client_uses_again_name_no_turn(scene: Scene) -> None:
    history = worked(scene, 0, 0)
    first = history[2].tool_calls[0].id
    sent = as_chat(without_reasoning(with_a_clock(history)), lambda old: first)
    assert thoughts_behind(scene, sent) == ["thought 0", "thought 1"]


def test_later_turns_of_a_shortened_conversation_keep_their_reasoning(scene: Scene) -> None:
    history = worked(scene, 0, 1)
    assert thoughts_behind(scene, [history[0], user("Summary: half done."), *history[4:]]) == ["thought 1"]
    assert causes(scene) == {1: "rewritten"}


def test_a_turn_that_was_edited_behind_a_changed_beginning_is_reported_as_edited(scene: Scene) -> None:
    history = with_a_clock(worked(scene, 0, 1))
    history[2] = replace(history[2], content="I look.")
    assert thoughts_behind(scene, history) == [None, "thought 1"] and causes(scene) == {0: "edited"}


def test_a_text_that_an_agent_made_up_gets_no_reasoning(tiny: SimpleNamespace) -> None:
    scene = Scene(tiny.tokenizer)
    scene.answer(OPENING, thinking("why", "so"))
    made_up = [OPENING[0], user("How are you?"), said("so"), user("and")]
    assert scene.prompt(*made_up).restored.messages == tuple(made_up)
    assert scene.recorder.drift_report().branch_causes == {}


def test_the_variables_of_an_endpoint_switch_the_checksum_of_claude_code_off() -> None:
    variables = Endpoint(url="http://127.0.0.1:1/s/a", token="t", model="policy").environment()
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


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
        *(called("a", "b"), called("ab", ""), *(called("a", {"n": number}) for number in (1, True, 1.5, "1"))),
    ]
    assert len({key_alone(message) for message in different}) == len(different)
    assert key_alone(called("a", {"n": 1, "m": 2})) == key_alone(called("a", {"m": 2, "n": 1}))
    for one, other in ((1, 1.0), (-0.0, 0), (12345678901234567890, 12345678901234567000), (1e21, 10**21)):
        assert key_alone(called("a", {"n": [one]})) == key_alone(called("a", {"n": [other]}))
    assert key_alone(said("b")) == key_alone(said(" b\n"))


def test_the_latest_of_equal_answers_comes_back_even_if_an_earlier_one_was_found(tiny: SimpleNamespace) -> None:
    scene, asked = Scene(tiny.tokenizer), [user("q")]
    scene.answer(asked, thinking("first", "a"))
    longer = [*asked, said("a"), user("r")]
    assert thoughts(scene.prompt(*longer).restored.messages) == ["first"]
    scene.answer(asked, thinking("second", "a"))
    found = scene.prompt(*longer).restored
    assert (thoughts(found.messages), found.guessed) == (["second"], [1])
    for thought in ("first", "third"):
        sent = scene.prompt(*asked, said("a", thought)).restored
        assert (thoughts(sent.messages), sent.guessed) == ([thought], [])


def test_an_answer_that_the_agent_made_up_first_is_found_once_the_model_gives_it(tiny: SimpleNamespace) -> None:
    scene, asked = Scene(tiny.tokenizer), [user("q")]
    longer = [*asked, said("a"), user("r")]
    assert scene.prompt(*longer).restored.messages == tuple(longer)
    scene.answer(asked, thinking("why", "a"))
    assert thoughts(scene.prompt(*longer).restored.messages) == ["why"]


def test_siblings_are_told_apart_by_what_they_led_to(tiny: SimpleNamespace) -> None:
    scene, asked = Scene(tiny.tokenizer), [user("q")]
    for thought, way in (("first", "left"), ("other", "right")):
        answer = scene.answer(asked, thinking(thought, "a"))
        scene.answer([*asked, answer, user("r")], thinking(f"on the {way}", way))
    for way, expected in (("left", ["first", "on the left"]), ("right", ["other", "on the right"])):
        found = scene.prompt(*asked, said("a"), user("r"), said(way), user("s")).restored
        assert (thoughts(found.messages), found.guessed) == (expected, [])
