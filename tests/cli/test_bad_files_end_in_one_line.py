"""What a user gives and no command can use ends with exit code 2 and one line: what was expected, what came."""

import decimal
import gzip
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fixture_types import Printed, Refused, Run
from record_files import write

from tree_rl.cost.cluster.parameters import Parameters
from tree_rl.inspection.model_shape import read_model_config

GOOD = '[{"input_ids": [1, 2, 3], "uid": "a"}]'
ACCENT = '[{"input_ids": [1], "uid": "é"}]'
NESTED = '[{"input_ids": ' + "[" * 10_000 + "]" * 10_000 + "}]"


def ids(numbers: str) -> str:
    """A file of one row."""
    return f'[{{"input_ids": [{numbers}]}}]'


def parquet(table: pyarrow.Table | None = None, **columns: Any) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns) if table is None else table, stream)
    return stream.getvalue()


def damaged(where: int) -> bytes:
    """A parquet file whose page header lies."""
    data = bytearray(parquet(input_ids=[[1, 2]] * 100))
    data[where : where + 16] = bytes(16)
    return bytes(data)


PARQUET = parquet(input_ids=[[1, 2]])
OTHER_MASK = parquet(input_ids=[[1], [1, 2]], loss_mask=[[1], [1]])
SHORT_MASK = parquet(input_ids=[[0, 1]], attention_mask=[[1]])
TWICE = parquet(pyarrow.Table.from_arrays([pyarrow.array([[1]])] * 2, names=["input_ids"] * 2))
UNSIGNED = pyarrow.array([[1], [2**64 - 1]], pyarrow.list_(pyarrow.uint64()))

FILES: dict[str, tuple[str, bytes | str, str]] = {
    "utf-16": ("r.json", ACCENT.encode("utf-16"), "expected text in UTF-8, received UTF-16"),
    "utf-16 without a mark": ("r.json", GOOD.encode("utf-16-le"), "expected text in UTF-8, received binary data or"),
    "latin-1": ("r.json", ACCENT.encode("latin-1"), "expected text in UTF-8, received byte 0xe9 at 28"),
    "byte order mark": ("r.json", b"\xef\xbb\xbf" + GOOD.encode(), "received UTF-8 with a byte order mark"),
    "parquet named json": ("r.json", PARQUET, "received a parquet file; name it *.parquet"),
    "json named parquet": ("r.parquet", GOOD, "not a parquet file: it holds JSON; name it *.json"),
    "list named jsonl": ("r.jsonl", GOOD, "row 0: expected an object, received list"),
    "a line cut off": ("r.jsonl", GOOD[1:-1] + '\n{"input_ids": [1\n', "line 2: not JSON"),
    "an object named json": ("r.json", "{}", "expected a list of objects"),
    "lines named json": ("r.json", '{"a": 1}\n{"a": 2}', "one object a line is named *.jsonl"),
    "carriage returns alone": ("r.jsonl", '{"a": 1}\r{"a": 2}\r', "give each object a line, ended by a line feed"),
    "cut gzip": ("r.json", gzip.compress(GOOD.encode())[:20], "received a gzip file; unpack it"),
    "gzip named parquet": ("r.parquet", gzip.compress(PARQUET), "it is a gzip file"),
    "cut zip": ("r.json", b"PK\x03\x04" + bytes(36), "received a zip archive"),
    "packed": ("r.json.gz", b"", "expected .parquet, .jsonl, .json, .arrow, .traj, .npz, received .gz"),
    "empty json": ("r.json", b"", "expected at least one row"),
    "empty parquet": ("r.parquet", b"", "not a parquet file: it is empty"),
    "garbage named parquet": ("r.parquet", b"\x1b[31m" * 100, "not a parquet file: it begins with"),
    "footer cut off": ("r.parquet", PARQUET[:-20], "expected a whole parquet file"),
    "page overwritten": ("r.parquet", damaged(4), "expected a whole parquet file"),
    "10,000 lists deep": ("r.json", NESTED, "at most 100 deep"),
    "10,000 objects deep": ("r.jsonl", '{"a":' * 10_000 + "1" + "}" * 10_000, "line 1: expected lists and objects"),
    "quotes never closed": ("r.json", '["' + '\\"' * 200_000, "not JSON: Unterminated string"),
    "5,000 digits": ("r.json", ids("1" * 5000), "expected integers of at most 4,300 digits"),
    "4,000 digits": ("r.json", ids("1" * 4000), "received an integer of about 3999 digits at 0"),
    "nan id": ("r.json", ids("1, NaN"), "column input_ids: expected a list of integers, received nan at 1"),
    "key twice": ("r.json", '[{"input_ids": [1], "input_ids": [2]}]', "received input_ids twice"),
    "column twice": ("r.parquet", TWICE, "received input_ids twice"),
    "nested": ("r.parquet", parquet(input_ids=[[[1]]]), "row 0, column input_ids: expected a list of integers"),
    "whole floats": ("r.parquet", parquet(input_ids=[[1.0]]), "drop the nulls and store it as int64"),
    "null": ("r.parquet", parquet(input_ids=[[1], [2, None]]), "row 1, column input_ids: expected a list of integers"),
    "boolean": ("r.json", ids("1, true"), "received True at 1"),
    "decimal": ("r.parquet", parquet(input_ids=[[decimal.Decimal(1)]]), "received Decimal('1') at 0"),
    "negative": ("r.json", ids("-1"), "token 0 is -1"),
    "beyond int64": ("r.json", ids("9223372036854775808"), "received 9223372036854775808 at 0"),
    "beyond int64 unsigned": ("r.parquet", parquet(input_ids=UNSIGNED), "row 1, column input_ids"),
    "beyond int32": ("r.json", ids("4294967296"), "token 0 is 4294967296"),
    "mask of 7": ("r.json", '[{"input_ids": [1], "loss_mask": [7]}]', "expected a list of 0 and 1, received 7 at 0"),
    "no group": ("r.json", '[{"input_ids": [1], "uid": null}]', "row 0, column uid: expected the row's group"),
    "group of lists": ("r.json", '[{"input_ids": [1], "uid": [1]}]', "row 0, column uid: expected the row's group"),
    "names that move the cursor": ("r.json", '[{"\\u001b[2J": 1}]', "received \\x1b[2J"),
    "a name of 100,000": ("r.json", json.dumps([{"c" * 100_000: 1}]), "received ccc"),
    "message of a surrogate": ("r.json", '[{"messages": 5}]', "--tokenizer"),
    "empty row": ("r.json", '[{"input_ids": [1]}, {"input_ids": []}]', "row 1: expected at least one token"),
    "missing cell": ("r.json", '[{"input_ids": [1]}, {"uid": "x"}]', "row 1, column input_ids: expected a list of"),
    "text": ("r.json", '[{"input_ids": "hello"}]', "expected a list of integers, received hello"),
    "long mask": ("r.json", '[{"input_ids": [1], "loss_mask": [1, 1]}]', "column loss_mask: expected 1 entries"),
    "mask of another row": ("r.parquet", OTHER_MASK, "row 1, column loss_mask: expected 2 entries"),
    "mask of text": ("r.parquet", parquet(input_ids=[[1]], loss_mask=[["1"]]), "received the text 1 at 0"),
    "no token": ("r.parquet", parquet(input_ids=[[1, 2]], attention_mask=[[0, 0]]), "column attention_mask: expected"),
    "short attention mask": ("r.parquet", SHORT_MASK, "row 0, column attention_mask: expected 2 entries"),
    "an id of text": ("r.json", ids('1, "2"'), "expected a list of integers, received the text 2 at 1"),
    "one bad line": ("r.jsonl", '{"input_ids": [1]}\n' * 3 + "# end", "line 4: not JSON"),
    "pointer of Git LFS": ("r.parquet", "version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "cut arrow": ("r.arrow", b"ARROW1", "expected a whole arrow file"),
    "unknown columns": ("r.json", '[{"text": "hello", "label": 1}]', "received text, label"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_ends_every_command_in_one_line(case: str, tmp_path: Path, refused: Refused) -> None:
    name, content, message = FILES[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    drawing = tmp_path / "drawing.svg"
    for command in (("inspect", "--draw", "svg", drawing), ("plan", "--max-tokens", "8")):
        refused(message, *command, path)
        assert [found.name for found in tmp_path.iterdir()] == [name]


def test_benchmark_and_tokenizer_refuse_in_one_line_too(tmp_path: Path, chatml: Path, refused: Refused) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(ACCENT.encode("utf-16"))
    out = tmp_path / "figures"
    refused("received UTF-16", "bench", "--model", "tiny", "--data", path, "--out", out)
    assert not out.exists()
    for message, said, *rows in (
        ('"role": "user", "content": "\\ud800"', "row 0, message 0: expected Unicode text"),
        ('"role": [1], "content": "\\u001b[31m"', "row 0, message 0: the chat template refuses it"),
        ('"content": "no role"', "column messages: expected a list of messages with"),
        ('"role": "user", "content": "hi"', "row 0: expected an assistant message", "--rows", "call"),
    ):
        path.write_text(f'[{{"messages": [{{{message}}}]}}]')
        refused(said, "inspect", path, "--tokenizer", chatml, *rows)


def test_what_is_no_file_is_named(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to("nowhere")
    (tmp_path / "circle.json").symlink_to("circle.json")
    for name, message in {
        "folder.json": "in this folder, found none",
        "pipe.json": "expected a file, received a pipe",
        "link.json": "no such file",
        "circle.json": "expected a file that can be read",
        "*.nothing": "expected files that match, found none",
        "absent.parquet": "no such file",
        "n" * 3000 + ".json": "File name too long",
        "\x1b[31mred\n.json": "\\x1b[31mred\\n.json: no such file",
        "\udcff.json": "\\udcff.json: no such file",
    }.items():
        refused(message, "inspect", tmp_path / name)


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 100}
VALUES = {"linear_num_value_heads": 2, "linear_value_head_dim": 4}
CONFIGS: dict[str, tuple[Any, str]] = {
    "list": ([SIZES], "expected an object, received list"),
    "nothing": ({}, "expected the sizes hidden_size"),
    "negative": ({**SIZES, "hidden_size": -8}, "hidden_size: expected a count, received int -8"),
    "boolean": ({**SIZES, "head_dim": True}, "head_dim: expected a count, received bool True"),
    "huge": ({**SIZES, "vocab_size": 10**400}, "vocab_size: expected a count, received int an integer of"),
    "no heads": ({**SIZES, "num_attention_heads": 0}, "expected the sizes num_attention_heads"),
    "more heads than width": ({**SIZES, "num_attention_heads": 16}, "head_dim: expected at least 1"),
    "layer types": ({**SIZES, "layer_types": [[1]]}, "layer_types: expected a list of names"),
    "width of a layer": ({**SIZES, "intermediate_size": [8, -8]}, "intermediate_size: expected a count, received list"),
    "layers": ({**SIZES, "num_hidden_layers": 2**31 - 1}, "num_hidden_layers: expected at most 65536, received 2147"),
    "delta net": (SIZES | VALUES, "expected the sizes linear_num_key_heads, linear_key_head_dim in its config.json"),
    "delta net of names": ({**SIZES, "linear_num_value_heads": "x"}, "linear_num_value_heads: expected a count"),
    "decoder": ({"text_config": [1]}, "expected text_config: an object, received list [1]"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_model_config_is_named(case: str, tmp_path: Path, refused: Refused) -> None:
    config, message = CONFIGS[case]
    model = write(tmp_path / "config.json", config)
    (tmp_path / "rows.json").write_text(GOOD)
    for command in (("inspect",), ("plan", "--max-tokens", "8")):
        refused(message, *command, tmp_path / "rows.json", "--model", model)


def test_a_width_for_each_layer_is_read_as_their_mean(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {**SIZES, "num_hidden_layers": 2, "intermediate_size": [8, 16]})
    shape, config = read_model_config(tmp_path)
    assert shape.intermediate == 12
    assert Parameters.of(shape, config) == Parameters.of(shape, {**config, "intermediate_size": 12})


def test_a_bad_option_is_named(tmp_path: Path, tree_rl: Run) -> None:
    rows, model = tmp_path / "rows.json", write(tmp_path / "config.json", {**SIZES, "vocab_size": 3})
    rows.write_text(GOOD)
    for options, message in (
        (("--group-by", "colour"), "--group-by colour: no such column"),
        (("--tokenizer", tmp_path), "expected a folder with tokenizer.json"),
        (("--model", tmp_path), "expected "),
        (("--draw", "text", "-", "--draw-group", "z"), "--draw-group z: no such group"),
        (("--model", model), "row 0: expected token ids in [0, 3), but token 2 is 3"),
    ):
        # The table may be there already.
        code, _, err = tree_rl("inspect", rows, *options)
        assert (code, err.count("\n")) == (2, 1) and message in err, err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "expected a tokenizer that reads text"),
        ("tokenizer.json", "[" * 100_000, "expected a tokenizer that reads text"),
        ("tokenizer.json", "é".encode("latin-1"), "tokenizer.json: expected text in UTF-8"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected an object, received []"),
        ("tokenizer_config.json", "[" * 5000, "tokenizer_config.json: expected lists and objects at most 100 deep"),
        ("chat_template.jinja", "{% if", "expected a chat template in Jinja"),
        ("chat_template.jinja", "é".encode("latin-1"), "chat_template.jinja: expected text in UTF-8"),
        ("chat_template.jinja", "{{ 1 / 0 }}", "the chat template refuses it: ZeroDivisionError"),
        ("chat_template.jinja", "{{ raise_exception('\x1b[31m') }}", "refuses it: TemplateError: \\x1b[31m"),
        ("chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it: RecursionError"),
    ],
)
def test_a_bad_tokenizer_folder_is_named(
    name: str, content: str | bytes, message: str, tmp_path: Path, chatml: Path, refused: Refused
) -> None:
    folder = Path(shutil.copytree(chatml, tmp_path / "tokenizer"))
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = write(tmp_path / "rows.json", [{"messages": [{"role": "user", "content": "hi"}]}])
    refused(message, "inspect", rows, "--tokenizer", folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("inspect", "Missing argument"),
        ("inspect a.json b\x1b[31m.json", "b\\x1b[31m.json"),
        ("plan a.json --max-tokens 0", "--max-tokens"),
        ("plan a.json --max-tokens 8 --sp 1", "--sp: expected it together with --ranks"),
        ("plan a.json --max-tokens 8 --cluster", "--cluster: expected it together with --ranks"),
        ("plan a.json --max-tokens 8 --checkpoint c", "--checkpoint: expected it together with --ranks"),
        ("plan --ranks 8 --cluster --max-tokens 8", "--max-tokens: expected it together with --model"),
        ("plan --ranks 8 --cluster --shards 8", "--shards: expected it together with --model"),
        ("plan --ranks 8 --model 8b --server-gpus 2", "--server-gpus: expected it together with"),
        ("plan --ranks 8 --model 8b --rollout-seconds 2", "together with --cluster and no --model"),
        ("plan --ranks 4 --cluster", "expected the log of a run, or --rollout-seconds with --training-seconds"),
        ("plan --ranks 4 --cluster --rollout-seconds 4", "expected the log of a run"),
        ("plan --ranks 1 --cluster --rollout-seconds 4 --rows-seconds 4", "--ranks 1: expected GPUs"),
        ("plan --ranks 4 --cluster --rollout-seconds inf", "'--rollout-seconds': Input should be less than"),
        ("plan --ranks 4", "plan: expected FILE and --max-tokens"),
        ("plan", "plan: expected FILE and --max-tokens"),
        ("inspect a.json --gpus 8", "--gpus: expected it together with --model"),
        ("inspect a.json --gpu h200", "--gpu: expected it together with --model"),
        ("inspect a.json --draw-group a", "--draw-group: expected it together with --draw"),
        ("view a.json --html page.html --port 8000", "--port: expected it without --html"),
        ("report a.json --watch --out page.html", "--out: expected it without --watch"),
        ("nothing\x1b[2J", "nothing"),
        ("inspect a.json --\x1b[2J", "--\\x1b[2J"),
    ],
)
def test_a_mistake_in_the_command_line_is_one_line(line: str, message: str, refused: Refused) -> None:
    refused(message, *line.split())


def test_texts_of_a_file_reach_the_terminal_escaped_and_stay_inside_json(tmp_path: Path, printed: Printed) -> None:
    hostile = ["\x1b[31mred\x07\r\n\x00", "\u202eevil", "\ud800", "x" * 100_000, "é 漢", "</script>"]
    rows = write(tmp_path / "rows.json", [{"input_ids": [1, 2], "uid": uid} for uid in hostile])
    picture = tmp_path / "drawing.svg"
    for uid in hostile:
        out = printed("inspect", rows, "--draw", "text", "-", "--draw-group", uid)
        assert out.replace("\n", "").isprintable()
        assert "\\x1b[31mred" in out and "\\u202eevil" in out and "\\ud800" in out and "é 漢" in out
        assert max(map(len, out.splitlines())) < 200
        printed("inspect", rows, "--draw", "svg", picture, "--draw-group", uid)
        assert picture.read_text("utf-8").replace("\n", "").isprintable()
    assert printed("plan", rows, "--max-tokens", 100).replace("\n", "").isprintable()
    out = printed("inspect", rows, "--json")
    assert out.isascii() and out[:-1].isprintable()
    assert [group["name"] for group in json.loads(out)["groups"]] == hostile
