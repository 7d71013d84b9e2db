"""What cannot be read ends with exit code 2 and a message that names the row, the column or the option."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tree_rl.cli import app

GOOD = {"input_ids": [1, 2, 3]}
RECORDS = {
    "empty row": ([GOOD, {"input_ids": []}], "row 1: expected at least one token"),
    "missing cell": ([GOOD, {"uid": "x"}], "row 1, column input_ids: expected a list of integers, received nothing"),
    "text": ([{"input_ids": "hello"}], "row 0, column input_ids: expected a list of integers, received hello"),
    "nested": ([{"input_ids": [[1, 2]]}], "row 0, column input_ids"),
    "fractions": ([{"input_ids": [1.5]}], "row 0, column input_ids"),
    "negative id": ([GOOD, {"input_ids": [4, -100]}], "row 1: expected token ids in [0, "),
    "long mask": ([{"input_ids": [1, 2], "loss_mask": [1, 1, 1]}], "row 0, column loss_mask: expected 2 entries"),
    "unknown columns": ([{"text": "hello", "label": 1}], "received text, label"),
    "not an object": ([GOOD, [1, 2]], "row 1: expected an object, received list"),
    "messages": ([{"messages": [{"role": "user", "content": "hi"}]}], "need --tokenizer"),
}


def run(path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", str(path), *options])
    return result.exit_code, result.output


def write_records(path: Path, records: list[Any]) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


@pytest.mark.parametrize("case", RECORDS)
def test_bad_record_is_named(case: str, tmp_path: Path) -> None:
    records, message = RECORDS[case]
    code, output = run(write_records(tmp_path / "rows.json", records))
    assert code == 2
    assert message in output


def test_bad_option_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "rows.json", [GOOD])
    for options, message in [
        (("--group-by", "colour"), "--group-by colour: no such column"),
        (("--tokenizer", str(tmp_path)), "expected a folder with tokenizer.json"),
        (("--model", str(tmp_path)), "expected a config.json"),
        (("--draw", "text", "-", "--draw-group", "z"), "--draw-group z: no such group"),
    ]:
        code, output = run(path, *options)
        assert (code, message in output) == (2, True), output


def test_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 10,
    }
    model = tmp_path / "config.json"
    model.write_text(json.dumps({**sizes, "vocab_size": 10}), encoding="utf-8")
    path = write_records(tmp_path / "rows.json", [GOOD, {"input_ids": [4, 5, 10]}])
    code, output = run(path, "--model", str(model))
    assert code == 2
    assert "row 1: expected token ids in [0, 10), but token 2 is 10" in output


def test_bad_message_is_named(tmp_path: Path, qwen_tokenizer: Path) -> None:
    path = write_records(tmp_path / "rows.json", [{"messages": [{"content": "no role"}]}])
    code, output = run(path, "--tokenizer", str(qwen_tokenizer))
    assert code == 2
    assert "row 0, column messages: expected a list of messages with a role" in output


def test_conversation_without_a_model_call_is_named(tmp_path: Path, qwen_tokenizer: Path) -> None:
    path = write_records(tmp_path / "rows.json", [{"messages": [{"role": "user", "content": "hi"}]}])
    code, output = run(path, "--tokenizer", str(qwen_tokenizer), "--rows", "call")
    assert code == 2
    assert "row 0: expected an assistant message" in output
