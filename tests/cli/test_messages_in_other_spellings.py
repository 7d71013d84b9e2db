"""One conversation, however it is spelled, gives the rows of its plain form; what says nothing is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizer import write_byte_tokenizer
from fixture_types import Printed
from record_files import read_of, write
from tokenizers import Tokenizer

from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.files import InputError
from tree_rl.inspection.messages.template_form import REASONING_FIELDS
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_row_file

QUESTION_FIRST = """{%- set seen = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}
{%- if seen.last < 0 %}{{- raise_exception('No user query found in messages.') }}{% endif %}
{%- if tools %}{{- '<|im_start|>tools ' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and loop.index0 > seen.last %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- for name, value in call.function.arguments | items %}{{- '<' + name + '>' + value | string }}{% endfor %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
"""As Qwen 3.5: refuses a beginning without a question, drops empty reasoning of earlier turns, takes objects alone."""
CALL = {"name": "look", "arguments": {"path": "a.py"}}
TEXT = json.dumps


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def function(of: Any) -> list[dict[str, Any]]:
    """A call, or a schema, in the only place of its list."""
    return [{"type": "function", "function": of}]


def blocks(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


SCHEMA = {"properties": {"path": {"type": "string"}}}
TOOLS = function({"name": "look", "parameters": SCHEMA})
SYSTEM, ASKED, DONE = say("system", "You mend code."), say("user", "Fix it."), say("assistant", "Done.")
LOOKS = say("assistant", "I look.", tool_calls=function(CALL))
PLAIN = [SYSTEM, ASKED, LOOKS, say("tool", "x = 1"), DONE]
CALLED = {**LOOKS, "tool_calls": TEXT(function(TEXT({**CALL, "arguments": TEXT(CALL["arguments"])})))}
BLOCKS = [
    SYSTEM,
    say("user", blocks("Fix ", "it.")),
    say("assistant", [*blocks("I look."), {"type": "tool_use", "id": "t", "name": "look", "input": CALL["arguments"]}]),
    say("user", [{"type": "tool_result", "tool_use_id": "t", "content": blocks("x = 1")}]),
    say("assistant", blocks("Done.")),
]
BLOCKS_AS_TEXT = [SYSTEM, *({**one, "content": TEXT(one["content"])} for one in BLOCKS[1:])]
TOOLS_OF_ANTHROPIC = [{"name": "look", "input_schema": SCHEMA}]
THREAD = [say(one["role"], [{"type": "text", "text": {"value": one["content"], "annotations": []}}]) for one in PLAIN]
GEMINI = [
    SYSTEM,
    {"role": "user", "parts": [{"text": "Fix it."}]},
    {"role": "model", "parts": [{"text": "I look."}, {"functionCall": {"name": "look", "args": CALL["arguments"]}}]},
    {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": "x = 1"}}]},
    {"role": "model", "parts": [{"text": "Done."}]},
]
SPELLINGS: dict[str, dict[str, Any]] = {
    "text": {"messages": TEXT(PLAIN), "tools": TEXT(TOOLS)},
    "text of text": {"messages": TEXT(TEXT(PLAIN)), "tools": TEXT(TEXT(TOOLS))},
    "list of texts": {"messages": [TEXT(one) for one in PLAIN], "tools": [TEXT(one) for one in TOOLS]},
    "calls as text": {"messages": [*PLAIN[:2], CALLED, *PLAIN[3:]], "tools": TOOLS},
    "wrapped": {"messages": {"messages": PLAIN, "tools": TEXT(TOOLS)}},
    "text of wrapped": {"messages": TEXT({"input": TEXT(PLAIN), "tools": TOOLS})},
    "parameters as text": {"messages": PLAIN, "tools": function(TEXT({"name": "look", "parameters": TEXT(SCHEMA)}))},
    "blocks": {"messages": BLOCKS, "tools": TOOLS},
    "blocks as text": {"messages": BLOCKS_AS_TEXT, "tools": TOOLS},
    "tools of Anthropic": {"messages": BLOCKS[1:], "system": SYSTEM["content"], "tools": TOOLS_OF_ANTHROPIC},
    "threads of OpenAI": {"messages": [*THREAD[:2], LOOKS, *THREAD[3:]], "tools": TOOLS},
    "Gemini": {"messages": GEMINI, "tools": TOOLS},
    "nulls": {"messages": [{"tool_calls": None, "name": None, **one} for one in PLAIN], "tools": TOOLS},
}


@pytest.fixture
def question_first(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "question_first", QUESTION_FIRST)


def trained_text(row: Row, folder: Path) -> str:
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = np.split(np.arange(len(row.token_ids)), np.flatnonzero(np.diff(row.trained.astype(int))) + 1)
    chosen = [row.token_ids[piece] for piece in pieces if row.trained[piece[0]]]
    return "|".join(vocabulary.decode(piece.tolist(), skip_special_tokens=False) for piece in chosen)


@pytest.mark.parametrize(("template", "rows_per"), [("chatml", RowsPer.TRIAL), ("question_first", RowsPer.CALL)])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_give_the_rows_of_the_plain_form(
    name: str, template: str, rows_per: RowsPer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    given = {"tokenizer": request.getfixturevalue(template), "rows_per": rows_per}
    expected = read_row_file(write(tmp_path / "p.json", [{"messages": PLAIN, "tools": TOOLS}]), **given)
    assert len(expected) == (1 if rows_per is RowsPer.TRIAL else 2)
    for ending in ("json", "jsonl"):
        found = read_row_file(write(tmp_path / f"f.{ending}", [SPELLINGS[name]]), **given)
        assert read_of(found) == read_of(expected)


BEFORE, CHOICES = PLAIN[:-1], TEXT({"choices": [{"message": say("assistant", blocks("Do", "ne."))}]})
LOGS: dict[str, dict[str, Any]] = {
    "openai": {"request": TEXT({"messages": BEFORE, "tools": TEXT(TOOLS)}), "response": CHOICES},
    "litellm": {"messages": TEXT(BEFORE), "response": TEXT(DONE), "model_parameters": TEXT({"tools": TOOLS})},
    "langfuse": {"input": TEXT({"messages": BEFORE, "tools": TOOLS}), "output": TEXT(TEXT(DONE)), "type": "GENERATION"},
    "list of texts": {"input": [TEXT(one) for one in BEFORE], "output": {"output": DONE}, "tools": TEXT(TOOLS)},
    "trl": {"prompt": TEXT(BEFORE), "completion": TEXT([DONE]), "tools": TOOLS},
}


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_logs_kept_as_text(name: str, ending: str, tmp_path: Path, chatml: Path) -> None:
    plain = write(tmp_path / "p.json", [{"messages": PLAIN, "tools": TOOLS}])
    expected = read_row_file(plain, tokenizer=chatml, rows_per=RowsPer.CALL)[-1:]
    found = read_row_file(write(tmp_path / f"f.{ending}", [LOGS[name]]), tokenizer=chatml)
    assert read_of(found) == read_of(expected)


ANSWERS = ({"type": "file", "name": "a"}, {"type": "text", "value": "hi"}, {"type": "image", "id": 3}, {"type": "x"})


@pytest.mark.parametrize("answer", ({"name": "x", "content": "y"}, *([one] for one in ANSWERS)))
def test_an_answer_in_json_stays_text(answer: Any, tmp_path: Path, chatml: Path) -> None:
    record = {"request": {"messages": PLAIN[:2]}, "response": TEXT(answer)}
    (row,) = read_row_file(write(tmp_path / "f.jsonl", [record]), tokenizer=chatml)
    assert trained_text(row, chatml).strip() == record["response"] + "<|im_end|>"


THINKS = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.NAME and message.role == 'assistant' %}{{ '<think>' + message.NAME + '</think>' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("name", REASONING_FIELDS)
@pytest.mark.parametrize("own", REASONING_FIELDS)
def test_a_thought_is_read_under_any_name(own: str, name: str, tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "tokenizer", THINKS.replace("NAME", own))
    chat = [SYSTEM, {**ASKED, name: "of a user"}, {**DONE, own: "", name: "Hm."}]
    (row,) = read_row_file(write(tmp_path / "f.json", [{"messages": chat}]), tokenizer=folder)
    assert trained_text(row, folder) == "<think>Hm.</think>Done.<|im_end|>\n"


CITED = [{"type": "text", "text": "Done.", "citations": [{"url": "x"}], "cache_control": {"type": "ephemeral"}}]
SILENT = [{"type": "text", "text": None, "annotations": []}, {"type": "text"}, {"type": "thinking", "signature": "x"}]
SILENT += [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_parts_without_text_say_nothing(ending: str, tmp_path: Path, chatml: Path) -> None:
    chats = [[say("user", blocks("Fix it.")), say("assistant", one)] for one in (blocks("Done."), [*SILENT, *CITED])]
    file = write(tmp_path / f"f.{ending}", [{"messages": chat} for chat in chats])
    plain, found = read_row_file(file, tokenizer=chatml)
    assert read_of([found]) == read_of([plain])


NO_TEXT: list[dict[str, Any]] = [
    {"type": "text", "content": "x"}, {"type": "text", "value": "x"}, {"type": "text", "text": ["a", "b"]},
    {"type": "text", "text": 5},
]  # fmt: skip
ANSWERED = [[part] for part in (*NO_TEXT, {"text": 5})]
RESULTS = [[{"type": "tool_result", "tool_use_id": "t", "content": [part]}] for part in NO_TEXT]


@pytest.mark.parametrize("parts", [*ANSWERED, *RESULTS])
def test_parts_whose_text_is_no_text_are_named(parts: Any, tmp_path: Path, chatml: Path) -> None:
    file = write(tmp_path / "f.json", [{"messages": [*PLAIN[:3], say("user", parts)]}])
    with pytest.raises(InputError, match="row 0, column messages, message 3: expected content in parts"):
        read_row_file(file, tokenizer=chatml)


NO_TOOLS = r"row 0, column messages, tools: expected function schemas"
NO_ROLE = r"row 0, column messages, message 1: expected the role .*, received policy"
UNKNOWN = [[{key: role, "content": "x"} for role in ("user", "policy")] for key in ("role", "from")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        *(({"messages": PLAIN, "tools": tools}, NO_TOOLS) for tools in ("look around", ["look"], 7)),
        *(({"messages": chat}, NO_ROLE) for chat in UNKNOWN),
    ],
)
def test_tools_that_are_none_and_unknown_roles_are_named(record: Any, said: str, tmp_path: Path, chatml: Path) -> None:
    with pytest.raises(InputError, match=said):
        read_row_file(write(tmp_path / "f.json", [record]), tokenizer=chatml)


def test_every_turn_trains_where_beginnings_are_refused(tmp_path: Path, question_first: Path) -> None:
    """A greeting before the first question, and turns whose reasoning the template drops once a question follows."""
    chat = [SYSTEM, say("assistant", "Hello!"), ASKED, DONE, say("user", "Again."), say("assistant", "No.")]
    file = write(tmp_path / "f.json", [{"messages": chat}])
    (row,) = read_row_file(file, tokenizer=question_first)
    end = "<|im_end|>\n"
    assert trained_text(row, question_first) == f"Hello!{end}|Done.{end}|\n</think>\n\nNo.{end}"
    # No model of this template was asked before the first question.
    calls = read_row_file(file, tokenizer=question_first, rows_per=RowsPer.CALL)
    said = [trained_text(call, question_first) for call in calls]
    assert said == [f"\n</think>\n\n{answer}{end}" for answer in ("Done.", "No.")]
    file = write(tmp_path / "f.json", [{"messages": [SYSTEM, DONE]}])
    with pytest.raises(InputError, match=r"row 0, message 0: the chat template refuses it: .*No user query"):
        read_row_file(file, tokenizer=question_first)


def test_nulls_that_parquet_adds_are_dropped_and_one_in_json_text_stays(tmp_path: Path, chatml: Path) -> None:
    other = function({"name": "run", "arguments": {"file": "b.py"}})
    chats = [PLAIN, [*PLAIN[:2], {**LOOKS, "tool_calls": other}, *PLAIN[3:]]]
    tools = TOOLS + function({"name": "run", "parameters": {"properties": {"file": {"type": "string"}}}})
    records = [{"messages": chat, "tools": tools, "uid": "a"} for chat in chats]
    padded = pyarrow.Table.from_pylist(records).column("messages").to_pylist()
    assert padded[0][2]["tool_calls"][0]["function"]["arguments"] == {"path": "a.py", "file": None}
    expected = read_row_file(write(tmp_path / "p.json", records), tokenizer=chatml)
    assert read_of(read_row_file(write(tmp_path / "f.parquet", records), tokenizer=chatml)) == read_of(expected)
    call = function({"name": "look", "arguments": '{"path": null}'})
    chat = [*PLAIN[:2], say("assistant", "", tool_calls=call)]
    (row,) = read_row_file(write(tmp_path / "f.parquet", [{"messages": chat}]), tokenizer=chatml)
    assert '{"path": null}' in trained_text(row, chatml)
    text = read_row_file(write(tmp_path / "g.parquet", [{"messages": TEXT(chat)}]), tokenizer=chatml)
    assert read_of(text) == read_of([row])


@pytest.mark.parametrize("role", ["bot", "model", "Assistant", "chatgpt", "GPT", "gpt-4o", " ai "])
@pytest.mark.parametrize("names", [("role", "content"), ("from", "value")])
def test_the_models_turns_train_under_any_name(role: str, names: tuple[str, str], tmp_path: Path, chatml: Path) -> None:
    chat = [SYSTEM, ASKED, DONE]
    expected = read_row_file(write(tmp_path / "p.json", [{"messages": chat}]), tokenizer=chatml)
    roles = ["system", "human", role]
    renamed = [{names[0]: name, names[1]: one["content"]} for name, one in zip(roles, chat, strict=True)]
    found = read_row_file(write(tmp_path / "f.jsonl", [{"conversations": renamed}]), tokenizer=chatml)
    assert read_of(found) == read_of(expected) and found[0].trained.any()


@pytest.mark.parametrize(
    "record",
    [{"messages": PLAIN[:2], "uid": "a"}, {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0], "uid": "a"}],
    ids=["no turn", "mask of zeros"],
)
def test_what_trains_nothing_is_promised_nothing(record: Any, tmp_path: Path, chatml: Path, printed: Printed) -> None:
    file = write(tmp_path / "f.json", [record] * 8)
    verdict = json.loads(printed("inspect", file, "--tokenizer", chatml, "--json"))["verdict"]
    assert (verdict["helps"], verdict["trains"], verdict["update_speed_up"]) == (False, False, [1.0, 1.0])
    out = printed("inspect", file, "--tokenizer", chatml)
    assert "Verdict: no token trains" in out and "trees help" not in out
    config = write(tmp_path / "config.json", MODEL_SIZES["tiny"].config)
    out = printed("inspect", file, "--tokenizer", chatml, "--model", config)
    assert "least memory of a GPU" in out and "update s" not in out


def test_equal_rows_are_named(tmp_path: Path, printed: Printed) -> None:
    records = [{"uid": uid, "input_ids": ids} for uid, ids in (("a", [1, 2]), ("a", [1, 2]), ("b", [1, 2]), ("a", [1]))]
    out = printed("inspect", write(tmp_path / "f.json", records))
    assert "equal rows  1 of 4 rows repeat another row of their group" in out
    assert "equal rows" not in printed("inspect", write(tmp_path / "g.json", records[1:]))


def test_the_next_line_proposes_the_run_and_not_the_number_of_the_call(tmp_path: Path, printed: Printed) -> None:
    """Two runs of five calls: a column of five groups is no better than one of two."""
    calls = [(run, call, list(range(10 * run, 10 * run + call + 2))) for run in (1, 2) for call in range(5)]
    records = [{"run_id": f"run{run}", "call": call, "input_ids": [1, 2, 3, *ids]} for run, call, ids in calls]
    found = json.loads(printed("inspect", write(tmp_path / "trace_runs.jsonl", records), "--json"))
    assert [one["column"] for one in found["group_by"]] == ["run_id", "call"]
    assert found["verdict"]["next"].endswith("--group-by run_id")


STEPS = [(1, "Done."), (1, "Dont."), (2, "Done."), (2, "Maybe.")]


@pytest.mark.parametrize("names", [("input", "output", "step"), ("prompt", "completion", "global_step")])
@pytest.mark.parametrize("is_folder", [False, True])
def test_steps_of_a_dump_stand_apart(names: tuple[str, ...], is_folder: bool, tmp_path: Path, chatml: Path) -> None:
    records = [dict(zip(names, ("Fix it.", answer, step), strict=True)) for step, answer in STEPS]
    path = write(tmp_path / "f.jsonl", records)
    if is_folder:
        path = tmp_path / "dumps"
        path.mkdir()
        for step in (1, 2):
            write(path / f"{step}.jsonl", [record for record in records if record[names[2]] == step])
    groups = [row.group for row in read_row_file(path, tokenizer=chatml)]
    assert len(set(groups)) == 2 and groups[0] == groups[1] != groups[2] == groups[3]
    if not is_folder:
        named = [row.group for row in read_row_file(path, tokenizer=chatml, group_by=names[0])]
        assert len(set(named)) == 1


def test_steps_of_an_agent_stay_together(tmp_path: Path) -> None:
    records = [{"task_id": "a", "step": step, "input_ids": list(range(1, 5 + step))} for step in range(4)]
    assert {row.group for row in read_row_file(write(tmp_path / "f.jsonl", records))} == {"a"}
    answers = [{"task_id": "a", "step": step, "input_ids": [1, 2, 7 + step]} for step in (1, 1, 2, 2)]
    assert len({row.group for row in read_row_file(write(tmp_path / "g.jsonl", answers))}) == 2
