"""One set of rows in every file format and under every column name gives one forest."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
from fixture_types import Printed, Refused
from record_files import read_of, write

from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_recording, read_row_file
from tree_rl.inspection.run_plan import plan_run

PROMPT = [5, 6, 7, 8]
RESPONSES = [[9, 10], [9, 11, 12], [13]]
WHOLE = {"input_ids": [PROMPT + response for response in RESPONSES], "uid": ["a", "a", "b"]}
SPLIT = {"prompt_ids": [PROMPT] * 3, "response_ids": RESPONSES, "uid": ["a", "a", "b"]}
VERL = {"prompts": [PROMPT] * 3, "responses": RESPONSES, "group": ["a", "a", "b"]}

RESPONSE_MASKS = [[1, 0], [1, 1, 1], [0]]
ROW_MASKS = [[0] * len(PROMPT) + mask for mask in RESPONSE_MASKS]


def write_columns(columns: dict[str, list[Any]], path: Path) -> Path:
    return write(path, [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("columns", [WHOLE, SPLIT, VERL], ids=["input_ids", "prompt_ids", "prompts"])
def test_every_format_holds_the_same_rows(columns: dict[str, list[Any]], ending: str, tmp_path: Path) -> None:
    rows = read_row_file(write_columns(columns, tmp_path / f"rows{ending}"))
    assert [row.token_ids.tolist() for row in rows] == WHOLE["input_ids"]
    assert [row.group for row in rows] == WHOLE["uid"]


@pytest.mark.parametrize("mask", [ROW_MASKS, RESPONSE_MASKS, None], ids=["row", "response", "none"])
def test_a_mask_covers_the_row_or_its_response_and_without_one_a_response_is_sampled(mask: Any, tmp_path: Path) -> None:
    columns = SPLIT if mask is None else {**SPLIT, "response_mask": mask}
    rows = read_row_file(write_columns(columns, tmp_path / "rows.parquet"))
    expected = [[4, 5], [4, 5, 6], [4]] if mask is None else [[4], [4, 5, 6], []]
    assert [np.flatnonzero(row.trained).tolist() for row in rows] == expected


def test_the_commands_need_no_tokenizer_for_token_ids(tmp_path: Path, printed: Printed) -> None:
    path = write_columns(SPLIT, tmp_path / "rows.parquet")
    assert "sampling" in printed("inspect", path)
    planned, cut = (printed("plan", path, "--max-tokens", budget) for budget in (8, 6))
    assert planned.splitlines()[2].split()[:4] == ["tree", "2", "2", "13"]
    assert cut.splitlines()[2].split()[:4] == ["tree", "2", "3", "13"]
    assert "partitioned" in cut and "partitioned" not in planned
    # Two forwards of less than a block each; a cut adds one.
    assert "visits 2 blocks of 128 x 128 tokens: 0 full, 2 partial (100%)" in planned
    assert "visits 3 blocks of 128 x 128 tokens: 0 full, 3 partial (100%)" in cut
    assert "Over the budget without trees: 1 row of more than 6 tokens (row 1)." in cut


def test_thousands_of_groups_are_planned_in_seconds() -> None:
    ids = [np.array([1, 2, number]) for number in range(12_000)]
    rows = [Row(name="row", group=str(at // 2), token_ids=one, trained=None) for at, one in enumerate(ids)]
    before = time.process_time()
    assert sum(plan_run(rows, 4096).whole) == 6_000 * 4
    assert time.process_time() - before < 6


def test_padding_of_verl_is_left_out(tmp_path: Path) -> None:
    """Prompts are padded on the left, responses on the right, as a saved DataProto has them."""
    padded = {
        "prompts": [[0, 0, *PROMPT]] * 3,
        "responses": [[*response, *[0] * (4 - len(response))] for response in RESPONSES],
        "attention_mask": [[0, 0, *[1] * (4 + len(one)), *[0] * (4 - len(one))] for one in RESPONSES],
        "response_mask": [[*mask, *[0] * (4 - len(mask))] for mask in RESPONSE_MASKS],
        "uid": ["a", "a", "b"],
    }
    rows = read_row_file(write_columns(padded, tmp_path / "rows.parquet"))
    assert read_of(rows) == list(zip(WHOLE["input_ids"], [[4], [4, 5, 6], []], strict=True))


def test_a_folder_and_a_pattern_are_all_their_files(tmp_path: Path) -> None:
    for name in ("more", ".ipynb_checkpoints"):
        (tmp_path / "dumps" / name).mkdir(parents=True)
    hidden = ((".ipynb_checkpoints/2-checkpoint.jsonl", WHOLE), ("more/._1.json", WHOLE))
    for name, column in (("2.jsonl", WHOLE), ("more/1.parquet", SPLIT), *hidden):
        write_columns(column, tmp_path / "dumps" / name)
    (tmp_path / "dumps" / "state.json").write_text("{}")
    (tmp_path / "dumps" / "notes.txt").write_text("none of these")
    for path in (tmp_path / "dumps", tmp_path / "dumps" / "**" / "*.*[lq]*"):
        rows = read_row_file(path)
        assert [row.token_ids.tolist() for row in rows] == 2 * WHOLE["input_ids"]


@pytest.mark.parametrize("pattern", ["run[1]", "run[1]/a.jsonl", "run[1]/*.jsonl", "run[1]/[a-z].jsonl", "r*/?.jsonl"])
def test_brackets_are_signs_of_a_pattern_where_no_such_folder_exists(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run[1]").mkdir()
    write_columns(WHOLE, tmp_path / "run[1]" / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / pattern, Path(pattern)):
        assert [row.token_ids.tolist() for row in read_row_file(path)] == WHOLE["input_ids"]


def test_a_folder_gives_linked_folders_once_and_endings_in_capitals(tmp_path: Path) -> None:
    for name in ("dumps/more/back", "dumps/step_1", "other"):
        (tmp_path / name).mkdir(parents=True)
    for at, name in enumerate(("dumps/more/A.JSONL", "dumps/step_1/B.PARQUET", "other/c.json")):
        write_columns(WHOLE, tmp_path / f"{at}{Path(name).suffix.lower()}").rename(tmp_path / name)
    links = {"latest": "step_1", "more/back/again": "../..", "other": "../other", "lost": "nowhere"}
    for name, target in links.items():
        (tmp_path / "dumps" / name).symlink_to(target)
    files = [row.file for row in read_row_file(tmp_path / "dumps")][::3]
    expected = ("more/A.JSONL", "other/c.json", "step_1/B.PARQUET")
    assert files == [tmp_path / "dumps" / name for name in expected]


@pytest.mark.parametrize("ending", [".jsonl.gz", ".JSONL.BZ2", ".parquet.xz"])
def test_a_folder_with_packed_data_is_refused(ending: str, tmp_path: Path, refused: Refused) -> None:
    write_columns(WHOLE, tmp_path / "a.jsonl")
    (tmp_path / "trace.json.gz").write_bytes(b"")  # a profiler's
    assert len(read_row_file(tmp_path)) == 3
    (tmp_path / f"b{ending}").write_bytes(b"")
    for path in (tmp_path, tmp_path / f"b{ending}"):
        refused(f"b{ending}: expected .parquet, .jsonl, .json, .arrow, .traj, .npz, received .", "inspect", path)


def test_a_folder_of_hugging_face_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(WHOLE).save_to_disk(str(tmp_path / "saved"))
    assert [row.token_ids.tolist() for row in read_row_file(tmp_path / "saved")] == WHOLE["input_ids"]


@pytest.mark.parametrize("is_file", [False, True])
def test_both_formats_of_arrow_hold_rows_and_labels(is_file: bool, tmp_path: Path) -> None:
    table = pyarrow.table({"input_ids": WHOLE["input_ids"], "topic": ["x", "y", "z"]})
    open_writer = pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream
    with open_writer(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    found = read_recording(tmp_path / "rows.arrow")
    assert [row.token_ids.tolist() for row in found.rows] == WHOLE["input_ids"]
    assert found.labels == {"topic": ["x", "y", "z"]}


MESSAGES = [{"role": "user", "content": "Fix it."}, {"role": "assistant", "content": "Done."}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("swe_agent.traj", {"history": MESSAGES, "info": {"exit_status": "submitted"}, "trajectory": []}),
        ("mini.traj.json", {"messages": MESSAGES, "info": {}, "trajectory_format": "mini-swe-agent-1"}),
        ("tau2.json", {"info": {}, "tasks": [], "simulations": [{"task_id": "7", "messages": MESSAGES}]}),
    ],
)
def test_trajectories_of_others(name: str, content: Any, tmp_path: Path, chatml: Path) -> None:
    (expected,) = read_row_file(write(tmp_path / "plain.json", [{"messages": MESSAGES}]), tokenizer=chatml)
    (tmp_path / name).write_text(json.dumps(content))
    (found,) = read_row_file(tmp_path / name, tokenizer=chatml)
    assert read_of([found]) == read_of([expected])
    assert found.group == ("7" if name == "tau2.json" else Path(name).stem)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("a/train.jsonl", "b/train.jsonl"), ["a/train.jsonl", "b/train.jsonl"]),
        (("a/train.json", "a/train.jsonl"), ["train.json", "train.jsonl"]),
        (("a/train.jsonl", "b/test.jsonl"), ["train", "test"]),
    ],
)
@pytest.mark.parametrize("pattern", ["", "*/t*"])
def test_each_file_is_a_group(names: Sequence[str], groups: list[str], pattern: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [{"input_ids": [1, 2]}])
    assert [row.group for row in read_row_file(tmp_path / pattern)] == groups


def test_ids_beyond_a_gap_in_the_vocabulary_are_read(tmp_path: Path, chatml: Path) -> None:
    folder = Path(shutil.copytree(chatml, tmp_path / "tokenizer"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    for token in vocabulary["added_tokens"]:
        token["id"] += 1000
        vocabulary["model"]["vocab"][token["content"]] = token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    (row,) = read_row_file(write(tmp_path / "rows.json", [{"messages": MESSAGES}]), tokenizer=folder)
    assert row.token_ids.max() > 1000
