"""A call that a model wrote is read with its arguments, or stays in sight with a cause."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from dialect_writers import WRITERS
from dictated_answers import Scene, user
from gateway_harness import CHATML, SHELL, build_tokenizer, talking, tool_result
from protocol_turns import shell

from tree_rl.rollout.gateway.backend import BackendError, Generation
from tree_rl.rollout.gateway.dialects.dialect import Reading
from tree_rl.rollout.gateway.dialects.engine_parsers import EngineDialect
from tree_rl.rollout.gateway.dialects.families import DIALECTS
from tree_rl.rollout.gateway.dialects.json_arguments import Hermes
from tree_rl.rollout.gateway.protocols.messages import ChatMessage
from tree_rl.rollout.gateway.tokens.rendering import Renderer
from tree_rl.rollout.transcript import rows_of_calls

MEANT = [("shell", {"command": "ls"})]
HERMES_CALL = shell("ls")
ENGINES_READ = ("hermes", "qwen3_coder", "glm4", "kimi_k2", "mistral", "mistral_list")
"""Forms whose calls end open reasoning in vLLM."""
ENGINES_LEAVE = ("deepseek_v3", "deepseek_v3_1", "llama3")
CALLING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAME, ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
PAIRS = "{% for key, value in call.function.arguments.items() %}{{ key }}IS'{{ value }}'{% endfor %}"
GEMMA_PAIRS = PAIRS.replace("IS'", ':<|"|>').replace("'", '<|"|>')
LFM2_CALL = "<|tool_call_start|>[shell(command='ls')]<|tool_call_end|>"
MUSE = '<atem:function_calls>\n<atem:invoke name="%s">%s</atem:invoke>'
OTHER_FORMATS = {
    "gemma4": (
        f"<|tool_call>call:{NAME}{{{{ '{{' }}}}{GEMMA_PAIRS}}}<tool_call|>",
        '<|tool_call>call:shell{command:<|"|>ls<|"|>}<tool_call|>',
    ),
    "lfm2": (f"<|tool_call_start|>[{NAME}({PAIRS.replace('IS', '=')})]<|tool_call_end|>", LFM2_CALL),
    "muse": (MUSE % (NAME, ARGUMENTS), MUSE % ("shell", '{"command": "ls"}')),
    "without tags": (f"run {NAME} with {ARGUMENTS}", 'run shell with {"command": "ls"}'),
    # As LFM2's of old: it shows the tools, and leaves earlier calls out.
    "of no call": ("", LFM2_CALL),
}


def read(form: str, turn: str, *, is_open: bool = False) -> Reading:
    return DIALECTS[WRITERS[form][0]]().read(turn, tools=[SHELL], is_reasoning_open=is_open)


def found(reading: Reading) -> list[tuple[str, Any]]:
    return [(call.name, dict(call.arguments)) for call in reading.calls]


@pytest.mark.parametrize("is_open", [True, False], ids=["prompt opens", "model opens"])
@pytest.mark.parametrize("form", [*ENGINES_READ, *ENGINES_LEAVE])
def test_a_call_in_open_reasoning_is_read_as_engines_do_and_counted(form: str, is_open: bool) -> None:
    start, end = DIALECTS[WRITERS[form][0]]().marks
    begun = ("" if is_open else start) + "I look.\n"
    reading = read(form, begun + WRITERS[form][1](MEANT), is_open=is_open)
    assert reading.fault == "in_reasoning" and reading.content == ""
    assert found(reading) == (MEANT if form in ENGINES_READ else [])
    assert (reading.reasoning == "I look.") == (form in ENGINES_READ)
    # The closing mark in an argument closes nothing.
    meant = [("shell", {"command": f"a{end}b"})]
    spanning = read(form, begun + WRITERS[form][1](meant), is_open=is_open)
    assert form not in ENGINES_READ or found(spanning) == meant


@pytest.mark.parametrize("form", [*ENGINES_READ, *ENGINES_LEAVE])
def test_a_draft_in_closed_reasoning_is_no_call_and_a_lost_one_is_counted(form: str) -> None:
    _, end = DIALECTS[WRITERS[form][0]]().marks
    call = WRITERS[form][1](MEANT)
    draft = read(form, f"maybe {call}{end}Done.", is_open=True)
    assert (found(draft), draft.content, draft.fault) == ([], "Done.", None)
    silent = read(form, f"maybe {call}{end}\n\n", is_open=True)
    assert (found(silent), silent.fault) == ([], "in_reasoning")
    cut = read(form, f"maybe {call[: len(call) * 2 // 3]}", is_open=True)
    assert (found(cut), cut.fault) == ([], "in_reasoning")
    plain = read(form, "I think of nothing", is_open=True)
    assert (plain.reasoning, plain.fault) == ("I think of nothing", None)


def test_a_call_inside_harmonys_analysis_is_counted() -> None:
    turn = '<|channel|>analysis<|message|>why <|channel|>commentary to=functions.shell<|message|>{"command": "ls"}'
    reading = DIALECTS["harmony"]().read(turn, tools=[SHELL], is_reasoning_open=False)
    assert (found(reading), reading.fault) == ([], "in_reasoning")


@pytest.mark.parametrize("reasoning", ["field", "inline"])
async def test_a_session_goes_on_behind_a_call_in_open_reasoning(tiny: SimpleNamespace, reasoning: str) -> None:
    answers = {"a.py": "It is done.", "go": f"<think>\nI look.\n{HERMES_CALL}"}
    async with talking(tiny.backend(answers), reasoning=reasoning) as talk:
        message = (await talk.ask("go", tools=[SHELL])).choices[0].message
        sent = [{"role": "user", "content": "go"}, message.model_dump(), tool_result(message, "a.py")]
        await talk.ask(sent, tools=[SHELL])
    assert json.loads(message.tool_calls[0].function.arguments) == {"command": "ls"}
    assert talk.record.drift.unread == {0: "in_reasoning"}
    assert talk.record.drift.figures()["drift_unread_in_reasoning"] == 1
    assert reasoning != "field" or len(rows_of_calls(talk.record.calls)) == 1


async def test_a_draft_does_not_end_a_turn_of_one_call(tiny: SimpleNamespace) -> None:
    async with talking(tiny.scripted(f"<think>\n{shell('rm')}\n</think>\n\n{HERMES_CALL}\n{HERMES_CALL}")) as talk:
        answer = await talk.ask("go", tools=[SHELL], parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"command": "ls"}


READABLE: list[dict[str, Any]] = [
    {"name": "shell", "parameters": {"command": "ls"}},
    {"name": "shell", "args": {"command": "ls"}},
    {"name": "shell", "input": '{"command": "ls"}'},
    {"name": "shell", "command": "ls"},
    {"name": "shell", "arguments": {}, "parameters": {"command": "ls"}},
    {"name": "shell", "arguments": "{}", "command": "ls"},
    {"name": "shell", "arguments": '{"command": "ls"}'},
    {"type": "function", "function": {"name": "shell", "arguments": {"command": "ls"}}},
]
UNREADABLE: list[dict[str, Any]] = [
    {"name": "shell", "cmd": "ls"},
    {"name": "shell", "arguments": {}, "cmd": "ls"},
    {"name": "shell", "args": ["ls"]},
    {"name": "shell", "arguments": None},
    {"name": "shell", "arguments": None, "what": 1},
    {"name": "shell", "arguments": "ls"},
    {"name": "shell", "parameters": None},
    {"function": "shell", "parameters": {"command": "ls"}},
]


@pytest.mark.parametrize("written", [*READABLE, *UNREADABLE], ids=json.dumps)
@pytest.mark.parametrize("form", ["<tool_call>{}</tool_call>", "[TOOL_CALLS][{}]", "[TOOL_CALLS]{}", "{}"])
def test_arguments_are_read_wherever_a_model_puts_them_or_are_text_with_a_cause(
    form: str, written: dict[str, Any]
) -> None:
    turn = form.replace("{}", json.dumps(written))
    reading = read({"<": "hermes", "[": "mistral", "{": "llama3"}[form[0]], turn)
    if written in READABLE:
        assert found(reading) == MEANT
    else:
        assert (found(reading), reading.content) == ([], turn) and reading.fault is not None


@pytest.mark.parametrize("calls", [MEANT, [("shell", {})], [*MEANT, *MEANT]], ids=["one", "no arguments", "two"])
def test_a_whole_call_needs_no_last_tag_and_none_of_arguments(calls: list[Any]) -> None:
    turn = WRITERS["qwen3_coder"][1](calls)
    for kept in (turn.removesuffix("</tool_call>"), turn[:-4], turn.replace("</tool_call>", "")):
        reading = read("qwen3_coder", kept)
        assert (found(reading), reading.content, reading.fault) == (calls, "", None)
    assert found(read("mistral", WRITERS["mistral"][1](calls).replace("[ARGS]", ""))) == calls


def test_an_engine_that_drops_arguments_is_refused_and_one_in_reasoning_counts() -> None:
    """A stand-in for the engine: none is installed here."""
    dialect = object.__new__(EngineDialect)
    dialect._reasoning = Hermes()

    def extract(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
        around, start, call = text.partition("<tool_call>")
        return (around, [("shell", json.dumps(json.loads(call[:-12]).get("arguments", {})))]) if start else (text, [])

    dialect._extract = extract
    lost = '<tool_call>{"name": "shell", "parameters": {"command": "ls"}}</tool_call>'
    reading = dialect.read(lost, tools=[SHELL], is_reasoning_open=False)
    assert (found(reading), reading.content, reading.fault) == ([], lost, "refused")
    reading = dialect.read(f"why {HERMES_CALL}", tools=[SHELL], is_reasoning_open=True)
    assert (found(reading), reading.reasoning, reading.fault) == (MEANT, "why ", "in_reasoning")


@pytest.mark.parametrize("family", OTHER_FORMATS)
def test_a_template_that_no_dialect_reads_is_told_at_start_and_its_calls_count(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    template, turn = OTHER_FORMATS[family]
    tokenizer = build_tokenizer(CALLING_TEMPLATE.replace("CALL", template))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>"]})
    scene = Scene(tokenizer, tools=(SHELL,))
    told = "which dialect='hermes' does not read" if template else "writes a tool call as nothing"
    assert told in caplog.text
    message = scene.answer([user("go")], turn)
    assert (message.content, message.tool_calls) == (turn, ())
    scene.answer([user("hello")], "I call nothing.")
    assert scene.recorder.drift_report().unread == {0: "other_format"}


@pytest.mark.parametrize("template", [None, CHATML, CALLING_TEMPLATE.replace("CALL", HERMES_CALL)])
def test_other_templates_are_not_judged(template: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """One that its dialect reads, and one without tools."""
    if template is not None and "tool_calls" in template:
        template = template.replace('"shell"', f'"{NAME}"').replace('{"command": "ls"}', ARGUMENTS)
    Renderer(build_tokenizer(template), {})
    assert "does not read" not in caplog.text


@pytest.mark.parametrize(
    ("end", "causes"),
    [("<|endoftext|>", {0: "other_end"}), ("<|im_start|>", {0: "other_end"}), ("<|im_end|>", {}), ("", {})],
)
def test_a_turn_that_ends_with_another_token_branches_with_a_cause(
    tiny: SimpleNamespace, end: str, causes: dict[int, str]
) -> None:
    scene = Scene(tiny.tokenizer)
    answer = scene.answer([user("go")], "It is done.", end=end)
    for _ in range(2):
        scene.prompt(user("go"), ChatMessage(role="assistant", content=answer.content), user("more"))
    assert scene.recorder.drift_report().branch_causes == causes


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_log_probs_that_are_none_are_refused_by_name(wrong: float) -> None:
    with pytest.raises(BackendError, match=rf"at most 0, received {wrong} for token 1 of an answer \(id 8\)"):
        Generation(token_ids=(7, 8), log_probs=(-0.5, wrong), finish_reason="stop")
    assert Generation(token_ids=(7, 8), log_probs=(0.0, 1e-7), finish_reason="stop").log_probs == (0.0, 1e-7)
