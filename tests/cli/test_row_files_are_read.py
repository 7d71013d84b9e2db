"""One set of rows in every file format and under every column name gives one forest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from tree_rl.cli import app
from tree_rl.inspection.report import forest_of, report_groups
from tree_rl.inspection.row_file import read_row_file

PROMPT = [5, 6, 7, 8]
RESPONSES = [[9, 10], [9, 11, 12], [13]]
WHOLE = {"input_ids": [PROMPT + response for response in RESPONSES], "uid": ["a", "a", "b"]}
SPLIT = {"prompt_ids": [PROMPT] * 3, "response_ids": RESPONSES, "uid": ["a", "a", "b"]}
VERL = {"prompts": [PROMPT] * 3, "responses": RESPONSES, "group": ["a", "a", "b"]}

RESPONSE_MASKS = [[1, 0], [1, 1, 1], [0]]
ROW_MASKS = [[0] * len(PROMPT) + mask for mask in RESPONSE_MASKS]


def write(columns: dict[str, list[Any]], path: Path) -> Path:
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    else:
        path.write_text(json.dumps(records), encoding="utf-8")
    return path


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize("columns", [WHOLE, SPLIT, VERL], ids=["input_ids", "prompt_ids", "prompts"])
def test_every_format_holds_the_same_rows(columns: dict[str, list[Any]], ending: str, tmp_path: Path) -> None:
    rows = read_row_file(write(columns, tmp_path / f"rows{ending}"))
    assert [row.token_ids.tolist() for row in rows] == WHOLE["input_ids"]
    assert [row.group for row in rows] == WHOLE["uid"]


def test_rows_merge_inside_their_group_only(tmp_path: Path) -> None:
    rows = read_row_file(write(WHOLE, tmp_path / "rows.json"))
    forest = forest_of(rows)
    assert (forest.num_trees, forest.num_unique) == (2, (4 + 1 + 1 + 2) + 5)
    assert [report.overlap.unique_tokens for report in report_groups(rows)] == [8, 5]


def test_rows_without_a_group_column_form_one_group(tmp_path: Path) -> None:
    rows = read_row_file(write({"input_ids": WHOLE["input_ids"]}, tmp_path / "rows.json"))
    (report,) = report_groups(rows)
    assert (report.name, report.overlap.unique_tokens) == ("rows", 9)


@pytest.mark.parametrize("mask", [ROW_MASKS, RESPONSE_MASKS], ids=["row", "response"])
def test_a_mask_covers_the_row_or_its_response(mask: list[list[int]], tmp_path: Path) -> None:
    rows = read_row_file(write({**SPLIT, "response_mask": mask}, tmp_path / "rows.parquet"))
    assert [np.flatnonzero(row.trained).tolist() for row in rows] == [[4], [4, 5, 6], []]


def test_a_response_without_a_mask_counts_as_sampled(tmp_path: Path) -> None:
    rows = read_row_file(write(SPLIT, tmp_path / "rows.jsonl"))
    assert [int(np.sum(row.trained)) for row in rows] == [2, 3, 1]


def test_the_commands_need_no_tokenizer_for_token_ids(tmp_path: Path) -> None:
    path = str(write(SPLIT, tmp_path / "rows.parquet"))
    inspected = CliRunner().invoke(app, ["inspect", path])
    planned = CliRunner().invoke(app, ["plan", path, "--max-tokens", "8"])
    assert (inspected.exit_code, planned.exit_code) == (0, 0)
    assert "sampling" in inspected.output
    assert planned.output.splitlines()[2].split()[:4] == ["tree", "2", "2", "13"]
    cut = CliRunner().invoke(app, ["plan", path, "--max-tokens", "6"]).output
    assert cut.splitlines()[2].split()[:4] == ["tree", "2", "3", "13"]
    assert "partitioned" in cut and "partitioned" not in planned.output
    # Two forwards of less than a block each; a cut adds one.
    assert "visits 2 blocks of 128 x 128 tokens: 0 full, 2 partial (100%)" in planned.output
    assert "visits 3 blocks of 128 x 128 tokens: 0 full, 3 partial (100%)" in cut


def test_rollouts_that_training_dumped_are_read(tmp_path: Path) -> None:
    # The plugin imports verl: only this test pays for it.
    from tree_rl.verl_plugin.agent_loops.tree_dump import FinishedRow, append_tree

    finished = [
        FinishedRow(
            uid="a",
            session=0,
            index=index,
            step=1,
            prompt_ids=tuple(PROMPT),
            response_ids=tuple(response),
            response_mask=(1,) * len(response),
            reward=None,
        )
        for index, response in enumerate(RESPONSES)
    ]
    (report,) = report_groups(read_row_file(append_tree(tmp_path, "train", finished)))
    assert (report.name, report.overlap.paths, report.overlap.unique_tokens) == ("a", 3, 9)
