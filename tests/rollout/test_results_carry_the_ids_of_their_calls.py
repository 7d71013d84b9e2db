"""Kimi and Mistral write ids into the prompt: results carry those of their calls, whatever a client makes of ids."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dictated_answers import Scene, user
from gateway_harness import build_tokenizer, serving

from tree_rl.rollout.gateway.dialects.json_arguments import KimiK2, Mistral
from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage
from tree_rl.rollout.gateway.protocols.tool_results import answered_calls, with_ids_of_calls
from tree_rl.rollout.transcript import rows_of_calls

NAMES = ("look", "write")
TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES)
KIMI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n"
    "{% endif %}{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% for id in ([m.tool_call_id] if m.role == 'tool' else m.tool_calls | default([]) | "
    "map(attribute='id')) %}{% if id | length != 9 %}{{ raise_exception('ids of nine letters') }}{% endif %}"
    "{% endfor %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}[RESULT]{{ m.tool_call_id }}\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls | default([]) %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEW_IDS: dict[str, Callable[[str], str | None]] = {
    "kept": lambda old: old,
    "renamed": lambda old: f"toolu_{old}",
    "repeated": lambda old: "call_0",
    "omitted": lambda old: None,
}


def as_sent(message: ChatMessage, new_id: Callable[[str], str | None]) -> ChatMessage:
    if message.role == "tool":
        return replace(message, tool_call_id=new_id(message.tool_call_id or ""))
    calls = tuple(replace(call, id=new_id(call.id) or "", written_id=None) for call in message.tool_calls)
    return replace(message, tool_calls=calls, reasoning=None)


def write_kimi(number: int) -> str:
    calls = (f"functions.{name}:{2 * number + index}" for index, name in enumerate(NAMES))
    argued = (f'{one}<|tool_call_argument_begin|>{{"n": {number}}}' for one in calls)
    written = "".join(f"<|tool_call_begin|>{one}<|tool_call_end|>" for one in argued)
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def write_mistral(number: int) -> str:
    return "".join(f'[TOOL_CALLS]{name}[CALL_ID]{name[:4]}0000{number}[ARGS]{{"n": {number}}}' for name in NAMES)


FAMILIES = {
    "kimi": (KIMI, write_kimi, r"Return of (\S+)\n(\w+)", lambda n, i: f"functions.{NAMES[i]}:{2 * n + i}"),
    "mistral": (MISTRAL, write_mistral, r"\[RESULT\](\S+)\n(\w+)", lambda n, i: f"{NAMES[i][:4]}0000{n}"),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("ids", NEW_IDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_is_one_row_and_each_result_has_its_calls_id(family: str, ids: str, order: tuple[int, ...]) -> None:
    template, write, pattern, id_of = FAMILIES[family]
    scene = Scene(build_tokenizer(template), tools=TOOLS)
    # Without ids of its own a result in another order is known by its name.
    is_named = ids in ("repeated", "omitted")
    history: list[ChatMessage] = [user("q")]
    expected = []
    for number in range(3):
        message = scene.answer([as_sent(one, NEW_IDS[ids]) for one in history], write(number))
        assert [call.name for call in message.tool_calls] == list(NAMES)
        history.append(message)
        for index in order:
            call = message.tool_calls[index]
            name = call.name if is_named else None
            history.append(ChatMessage(role="tool", content=f"of_{number}_{index}", tool_call_id=call.id, name=name))
            expected.append((id_of(number, index), f"of_{number}_{index}"))
    prompt = scene.prompt(*(as_sent(one, NEW_IDS[ids]) for one in history))
    assert re.findall(pattern, prompt.text) == expected
    assert len(rows_of_calls(scene.recorder.calls)) == 1 and scene.recorder.drift_report().branch_causes == {}


@pytest.mark.parametrize("ids", NEW_IDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_a_client_made_up_have_ids_that_later_messages_do_not_change(family: str, ids: str) -> None:
    template, _, pattern, _ = FAMILIES[family]
    scene = Scene(build_tokenizer(template), tools=TOOLS)
    history, texts = [user("q")], []
    for number in range(3):
        calls = tuple(CalledTool(id=f"c{number}{name}", name=name, arguments={}) for name in NAMES)
        history.append(ChatMessage(role="assistant", tool_calls=calls))
        history += [ChatMessage(role="tool", content=f"of_{call.name}", tool_call_id=call.id) for call in calls]
        texts.append(scene.prompt(*(as_sent(one, NEW_IDS[ids]) for one in history)).text)
    ends = [text.removesuffix("<|im_start|>assistant\n") for text in texts]
    assert ends[1].startswith(ends[0]) and ends[2].startswith(ends[1])
    found = re.findall(pattern, texts[-1])
    assert len({id_ for id_, _ in found}) == 6
    if family == "kimi":
        assert [id_ for id_, _ in found] == [f"functions.{NAMES[n % 2]}:{n}" for n in range(6)]
    assert all(texts[-1].count(id_) == 2 for id_, _ in found), "the call and its result"


def result(id_: str | None, name: str | None = None) -> ChatMessage:
    return ChatMessage(role="tool", tool_call_id=id_, name=name)


def turn(*ids: str) -> ChatMessage:
    return ChatMessage(
        role="assistant", tool_calls=tuple(CalledTool(id=id_, name=id_[:1], arguments={}) for id_ in ids)
    )


@pytest.mark.parametrize(
    ("messages", "answered"),
    [
        ([turn("a", "b"), result(None), result("a")], [None, (0, 1), (0, 0)]),
        ([turn("a", "b"), result(None), result("x", "a")], [None, (0, 1), (0, 0)]),
        ([turn("a1", "a2"), result("a2"), result("a1")], [None, (0, 1), (0, 0)]),
        (
            [turn("a1", "b", "a2", "c"), *(result(None, name) for name in ("b", "a", "x", "c", "a"))],
            [None, (0, 1), (0, 0), (0, 2), (0, 3), None],
        ),
        ([turn("a"), result("a"), result("a"), result("z")], [None, (0, 0), (0, 0), None]),
        ([turn("a", "b"), result("b"), turn("c"), result("a"), result("c")], [None, (0, 1), None, (0, 0), (2, 0)]),
        ([turn("a"), result("a"), turn("a"), result("a")], [None, (0, 0), None, (2, 0)]),
        ([turn("a"), user("wait"), result("y")], [None, None, (0, 0)]),
        ([result("a"), user("q")], [None, None]),
        ([], []),
    ],
)
def test_results_are_paired_with_calls(messages: list[ChatMessage], answered: list[tuple[int, int] | None]) -> None:
    assert answered_calls(messages) == answered
    again = with_ids_of_calls(messages, answered)
    assert answered_calls(again)[: len(again)] == answered


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *((written, "look") for written in ("functions.look:1", "functions_look_1", "functions.look_1")),
        *((written, "look") for written in ("functionslook1", "look:1", "look")),
        ("other_1", "other_1"),
    ],
)
def test_an_id_in_another_spelling_is_no_tools_name(written: str, name: str) -> None:
    text = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    (call,) = KimiK2().read(text, tools=TOOLS, is_reasoning_open=False).calls
    assert (call.name, call.written_id) == (name, written)


def test_an_id_that_mistrals_templates_refuse_is_not_kept() -> None:
    text = "[TOOL_CALLS]" + json.dumps([{"name": "look", "arguments": {}, "id": id_} for id_ in ("short", "abc123XYZ")])
    calls = Mistral().read(text, tools=TOOLS, is_reasoning_open=False).calls
    assert [call.written_id for call in calls] == [None, "abc123XYZ"]


async def test_with_a_seed_a_sessions_ids_repeat(tiny: SimpleNamespace) -> None:
    async with serving(tiny.backend({}), tiny.tokenizer) as gateway:
        names = {
            seed: [gateway.open_session(sampling={} if seed is None else {"seed": seed}).name for _ in range(2)]
            for seed in (3, 4, None)
        }
    assert names[3][0] == names[3][1] != names[4][0]
    assert len({*names[3], *names[4], *names[None]}) == 4
