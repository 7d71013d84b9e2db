"""Every dialect reads the calls, text and reasoning that its family writes, and never more; the rest stays text."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from dialect_writers import CALLS, MARKUP, PLAIN, WRITERS, dumps, is_ambiguous, tools_for
from gateway_harness import SHELL
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from protocol_turns import call

from tree_rl.rollout.gateway.dialects.dialect import THINK_START
from tree_rl.rollout.gateway.dialects.families import DIALECTS, dialect_named
from tree_rl.rollout.gateway.dialects.json_arguments import Hermes
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.recorder import ReadAnswer, Recorder

ANY_TOOL = [{"type": "function", "function": {"name": "x", "parameters": {}}}]
EXAMPLES = settings(max_examples=20, deadline=None)
canonical = dumps
"""With the order of keys, and 1, 1.0 and true apart."""


def has_one_type(calls: list[tuple[str, dict[str, object]]]) -> bool:
    """Whether every parameter has one type: a union with string leaves a bare value open."""
    declared = (one for tool in tools_for(calls) for one in tool["function"]["parameters"]["properties"].values())
    return all(len(one["type"]) == 1 for one in declared)


@pytest.mark.parametrize("form", WRITERS)
@EXAMPLES
@given(calls=CALLS, before=PLAIN, after=PLAIN, data=st.data())
def test_calls_come_back_as_they_were_meant_and_of_a_cut_turn_those_before_the_cut(
    form: str, calls: list[tuple[str, dict[str, object]]], before: str, after: str, data: st.DataObject
) -> None:
    name, write = WRITERS[form]
    assume(not is_ambiguous(form, calls))
    assume(form not in ("qwen3_coder", "glm4") or has_one_type(calls))
    if form in ("llama3", "harmony", "mistral_list"):
        before = after = ""
    turn, given = write(calls), {"tools": tools_for(calls), "is_reasoning_open": False}
    read = DIALECTS[name]().read(before + turn + after, **given)
    assert canonical([(call.name, call.arguments) for call in read.calls]) == canonical(calls)
    assert read.fault is None and read.reasoning is None
    assert "".join(read.content.split()) == "".join((before + after).split())
    cut = DIALECTS[name]().read(turn[: data.draw(st.integers(0, len(turn)))], **given)
    found = [(call.name, call.arguments) for call in cut.calls]
    assert canonical(found) == canonical(calls[: len(found)])


MARKS = ("<|channel|>analysis", "<|channel|>final", "<|start|>assistant", "<|tool_call_argument_begin|>")
WORDS = (" to=functions.x ", '{"name": "x"}', "functions.x:0", "<｜tool▁sep｜>", *"x\n{[;", '"a', "NaN", "1e999")
TURNS = st.lists(st.sampled_from((*MARKUP, *MARKS, *WORDS)), max_size=12).map("".join)


@pytest.mark.parametrize("name", DIALECTS)
@EXAMPLES
@given(turn=TURNS, is_open=st.booleans(), with_tools=st.booleans())
def test_nothing_that_a_model_writes_raises(name: str, turn: str, is_open: bool, with_tools: bool) -> None:
    read = DIALECTS[name]().read(turn, tools=ANY_TOOL if with_tools else (), is_reasoning_open=is_open)
    assert with_tools or not read.calls
    if name != "harmony":
        assert read.calls or read.marked_reasoning + read.content == turn


@pytest.mark.parametrize(
    ("form", "turn", "fault"),
    [
        ("hermes", '<tool_call>{"name": "x", "arguments": {"a": }}</tool_call>', "no_json"),
        ("hermes", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>', "no_object"),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', "no_name"),
        ("hermes", '<tool_call>{"name": "x"}', "unclosed"),
        *(
            ("hermes", f'<tool_call>{{"name": "x", "arguments": {{"a": {value}}}}}</tool_call>', "no_json")
            for value in (r'"\ud800"', "9" * 5000, "[" * 300 + "]" * 300, "NaN", "1e999")
        ),
        ("hermes", r'<tool_call>{"name": "x", "arguments": {"\udc80": 1}}</tool_call>', "no_json"),
        ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', "no_json"),
        ("qwen3_coder", '<tool_call>{"name": "x"}</function></tool_call>', "malformed"),
        ("qwen3_coder", "<tool_call><function=x><parameter=k>1</function></tool_call>", "malformed"),
        ("qwen3_coder", "<tool_call><function=x><parameter=k>1", "unclosed"),
        ("glm4", "<tool_call>x<arg_key>k</arg_key></tool_call>", "malformed"),
        ("glm4", "<tool_call><arg_key>k</arg_key></tool_call>", "no_name"),
        ("kimi_k2", "<|tool_call_begin|>functions.x:0<|tool_call_end|>", "malformed"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>x<｜tool▁sep｜>{]<｜tool▁call▁end｜>", "no_json"),
        ("mistral", "[TOOL_CALLS]x[ARGS]{1}", "no_json"),
        ("mistral", '[TOOL_CALLS]x[ARGS]{"a": "', "unclosed"),
        ("llama3", '<|python_tag|>{"name": "x", "parameters": 1}', "no_object"),
        # JSON that is no call is an answer.
        *(("llama3", turn, None) for turn in ('{"name": "Bob"}', '{"answer": [1]}', "{", "[1, 2]")),
        ("llama3", '{"name": "x", "age": 3}', "malformed"),
        ("harmony", "<|channel|>commentary to=functions.x <|constrain|>json<|message|>{1}", "no_json"),
        # In another family's form it does not run without arguments.
        ("glm4", '<tool_call>x{"command": "ls"}</tool_call>', "malformed"),
        ("glm4", '<tool_call>{"name": "x", "arguments": {"command": "ls"}}</tool_call>', "malformed"),
        ("glm4", '<tool_call>x(command="ls")</tool_call>', "malformed"),
        ("qwen3_coder", '<tool_call><function=x command="ls"></function></tool_call>', "malformed"),
        ("qwen3_coder", '<function=x>{"command": "ls"}</function>', "malformed"),
        ("kimi_k2", "<|tool_call_begin|>functions.x:0<|tool_call_argument_begin|>null<|tool_call_end|>", "no_object"),
        ("deepseek_v3", '<｜tool▁call▁begin｜>x<｜tool▁sep｜>["ls"]<｜tool▁call▁end｜>', "no_object"),
        ("harmony", '<|channel|>commentary to=functions.x<|message|>"ls"<|call|>', "no_json"),
    ],
)
def test_a_call_that_cannot_be_read_is_text_with_a_cause(form: str, turn: str, fault: str | None) -> None:
    read = DIALECTS[form]().read(turn, tools=ANY_TOOL, is_reasoning_open=False)
    assert (read.calls, read.fault) == ((), fault)
    assert read.content == (turn if form != "harmony" else turn.split("<|message|>")[1].removesuffix("<|call|>"))


def test_bare_values_have_the_type_of_their_schema() -> None:
    types = {"text": "string", "number": "integer", "flag": "boolean", "either": ["integer", "string"]}
    schemas: dict[str, Any] = {name: {"type": one} for name, one in types.items()}
    schemas |= {"maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "open": {}, "choice": {"enum": ["1", "2"]}}
    tool = {"type": "function", "function": {"name": "x", "parameters": {"properties": schemas}}}
    written = {"text": "5", "number": "5", "maybe": "null", "flag": "True", "either": "5", "open": "[5]", "choice": "1"}
    meant = {"text": "5", "number": 5, "maybe": None, "flag": True, "either": 5, "open": [5], "choice": "1"}
    as_text = {"undeclared": "5", "number": "five", "text": "    if x:\n\t\treturn 1\n\n"}
    for given_, expected in ((written, meant), (as_text, as_text)):
        for form in ("qwen3_coder", "glm4"):
            turn = WRITERS[form][1]([("x", given_)])
            (one,) = DIALECTS[form]().read(turn, tools=[tool], is_reasoning_open=False).calls
            assert canonical(one.arguments) == canonical(expected)


def test_harmony_tells_channels_apart() -> None:
    turn = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.x<|channel|>commentary json<|message|>{"s": "<|end|>"}'
    )
    read = DIALECTS["harmony"]().read(turn, tools=ANY_TOOL, is_reasoning_open=False)
    assert (read.reasoning, read.content) == ("why", "I look.")
    assert [(call.name, call.arguments) for call in read.calls] == [("x", {"s": "<|end|>"})]
    cut = DIALECTS["harmony"]().read("<|channel|>analysis<|message|>wh", tools=ANY_TOOL, is_reasoning_open=False)
    assert (cut.reasoning, cut.content) == ("wh", "")


def test_reasoning_marks_in_arguments_are_text() -> None:
    turn = '<think>a</think>b<tool_call>{"name": "x", "arguments": {"s": "<think>c</think>d"}}</tool_call>'
    read = DIALECTS["hermes"]().read(turn, tools=ANY_TOOL, is_reasoning_open=False)
    assert (read.reasoning, read.content, read.calls[0].arguments) == ("a", "b", {"s": "<think>c</think>d"})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_named(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, engine, None)
    with pytest.raises(ValueError, match=rf"dialect='{engine}:x': {engine} cannot be imported"):
        dialect_named(f"{engine}:x", template="", tokenizer=None)


CALL = '<tool_call>{"name": "x"}</tool_call>'
RENDERER: Any = SimpleNamespace(dialect=Hermes(), other_format=None)


def read(text: str, *, is_reasoning_open: bool = False, reasoning: Any = "field") -> ChatMessage:
    options = GatewayOptions(max_context_tokens=1, max_turn_tokens=1, reasoning=reasoning)
    opened = THINK_START if is_reasoning_open else ""
    prompt: Any = SimpleNamespace(request=SimpleNamespace(tools=[SHELL]), text=opened, opening="")
    return Recorder("s", renderer=RENDERER, options=options).read(prompt, text)[0]


@pytest.mark.parametrize(
    ("turn", "text", "calls"),
    [
        ("hi", "hi", []),
        ("<think><tool_call>{}</tool_call></think>hi", "hi", []),
        ("<think>never closed <tool_call>{}</tool_call>", "", []),
        (f"a{CALL}b", "ab", [("x", {})]),
        (f"{CALL} and\n{call('y', n=1)}", "and", [("x", {}), ("y", {"n": 1})]),
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
    named = ReadAnswer(message=message, shown=message, fault=None).with_ids("call_s_0").shown
    assert [call.id for call in named.tool_calls] == [f"call_s_0_{index}" for index in range(len(calls))]


@pytest.mark.parametrize(
    ("turn", "is_open", "expected"),
    [
        ("hi", False, (None, "hi")),
        ("<think>\na\n</think>\n\nhi", False, ("a", "hi")),
        ("a</think>hi", True, ("a", "hi")),
        ("never closed", True, ("never closed", "")),
        (" <think>never closed", False, ("never closed", "")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("<think>a</think>b </think> c", False, ("a", "b </think> c")),
        ("</think>hi", False, ("", "hi")),
        ("end it with </think>, then answer", False, (None, "end it with </think>, then answer")),
    ],
)
def test_reasoning_is_split_off(turn: str, is_open: bool, expected: tuple[str | None, str]) -> None:
    message = read(turn, is_reasoning_open=is_open)
    assert (message.reasoning, message.content) == expected
    assert read(turn, is_reasoning_open=is_open, reasoning="inline").content == turn


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("unit", [" ", "{", "<tool_call>"])
def test_a_turn_that_repeats_itself_is_read_in_no_time(name: str, unit: str) -> None:
    started = time.thread_time()
    DIALECTS[name]().read("<think>" + unit * (60_000 // len(unit)), tools=[SHELL], is_reasoning_open=False)
    assert time.thread_time() - started < 2
