"""SFT refuses data that it would have to round, before an engine is built; nothing of it trains."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
from sft_harness import CPU, TOKEN_ROWS, sft_config, write

from tree_rl.inspection.files import InputError
from tree_rl.verl_plugin.sft import TreeSFTTrainer, group_rows
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset

GOOD: dict[str, Any] = {"input_ids": [[1, 2], [3, 4]], "loss_mask": [[0, 1], [0, 1]]}
BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "fraction": ({"input_ids": [[1.0, 2.0], [3.0, 1.9]]}, "row 1, column input_ids: .*received 1.9 at 1"),
    "negative": ({"input_ids": [[1, -1], [3, 4]]}, r"row 0, column input_ids: expected ids in \[0, .*received -1 at 1"),
    "mask of 7": ({"loss_mask": [[0, 1], [0, 7]]}, "row 1, column loss_mask: expected a list of 0 and 1, received 7"),
    "first token trained": ({"loss_mask": [[1, 1], [0, 1]]}, "row 0: loss_mask trains its first token"),
    "mask of another length": ({"loss_mask": [[0, 1], [0, 1, 1]]}, "row 1: .*received 3 for 2"),
    "empty row": ({"input_ids": [[1, 2], []], "loss_mask": [[0, 1], []]}, "row 1: .*at least one"),
    "nothing trained": ({"loss_mask": [[0, 0], [0, 0]]}, "nothing would train"),
    "no rows": ({"input_ids": [], "loss_mask": []}, "expected at least one row, received none"),
}


@pytest.mark.parametrize("case", BAD_COLUMNS)
def test_bad_token_rows_name_file_row_and_column(case: str, tmp_path: Path) -> None:
    columns, complaint = BAD_COLUMNS[case]
    good = write(tmp_path / "good.parquet", **GOOD)
    bad = write(tmp_path / "bad.parquet", **(GOOD | columns))
    with pytest.raises(InputError, match=rf"bad\.parquet.*{complaint}"):
        TokenRowsDataset(str(bad), None, {})
    if case not in ("no rows", "nothing trained"):
        # The row is counted in its own file.
        with pytest.raises(InputError, match=rf"^\S*bad\.parquet: {complaint}"):
            TokenRowsDataset([str(good), str(bad)], None, {})


def test_bad_files_are_named(tmp_path: Path) -> None:
    for path, complaint in (
        (tmp_path, "expected a file, received a folder"),
        (tmp_path / "absent.parquet", r"absent\.parquet: no such file"),
        (
            write(tmp_path / "a.parquet", input_ids=[[1]], mask=[[0]]),
            r"missing \['loss_mask'\]; it has input_ids, mask",
        ),
    ):
        with pytest.raises(InputError, match=complaint):
            TokenRowsDataset(str(path), None, {})


def test_large_slices_of_any_integer_type_are_read_exactly(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 100, draw.integers(1, 9)).tolist() for _ in range(200)]
    masks = [[0, *[1] * (len(row) - 1)] for row in ids]
    for kind in (pyarrow.int8(), pyarrow.int32(), pyarrow.uint16(), pyarrow.uint64()):
        for of in (pyarrow.list_, pyarrow.large_list):
            columns = {
                "input_ids": pyarrow.array(ids, of(kind)),
                "loss_mask": pyarrow.array(masks, of(pyarrow.int64())),
            }
            pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet", row_group_size=7)
            read = TokenRowsDataset(str(tmp_path / "rows.parquet"), None, {}, max_samples=150)
            for name, expected in (("input_ids", ids), ("loss_mask", masks)):
                assert [read[row][name].tolist() for row in range(len(read))] == expected[:150]
    booleans = write(tmp_path / "b.parquet", input_ids=[[1, 2]], loss_mask=[[False, True]])
    assert TokenRowsDataset(str(booleans), None, {})[0]["loss_mask"].tolist() == [0, 1]


def test_a_row_without_a_conversation_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", **GOOD, episode=["a", None])
    with pytest.raises(InputError, match=r"data\.group_key='episode': row 1"):
        group_rows(TokenRowsDataset(str(path), None, {}), "episode")
    # As verl's data set reads a file.
    numbers = write(tmp_path / "numbers.parquet", episode=[1.0, float("nan")])
    of_verl = SimpleNamespace(dataframe=pd.read_parquet(numbers, dtype_backend="pyarrow"))
    with pytest.raises(InputError, match=r"data\.group_key='episode': row 1"):
        group_rows(of_verl, "episode")


@pytest.mark.usefixtures("one_rank")
def test_mistakes_are_told_before_an_engine_is_built(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeSFTTrainer, "_build_engine", lambda self: pytest.fail("took a device"))
    good = write(tmp_path / "good.parquet", **GOOD)
    outside = write(tmp_path / "outside.parquet", **(GOOD | {"input_ids": [[1, 2], [3, 10**6]]}))
    nothing = write(tmp_path / "nothing.parquet", messages=[[{"role": "user", "content": "hi"}], []])
    no_role = write(tmp_path / "no_role.parquet", messages=[[{"content": "hi"}]])
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-10])
    two, one = ["data.train_batch_size=2", *TOKEN_ROWS], ["data.train_batch_size=1"]
    for file, more, complaint in (
        (outside, two, r"outside.*row 1, column input_ids: .*received 1000000 at 1"),
        (good, [f"data.val_files={outside}", *two], r"outside.*row 1, column input_ids"),
        (good, ["data.train_batch_size=8", *TOKEN_ROWS], "at least the 8 rows of a batch"),
        (good, [], r"data\.train_files: \S*good.*expected a column messages"),
        (cut, [], "expected a whole parquet file"),
        (no_role, one, "row 0, column messages"),
        (nothing, one, r"nothing\.parquet: row 1, column messages: .* \[\]"),
    ):
        with pytest.raises(InputError, match=complaint):
            TreeSFTTrainer(sft_config(f"model.path={toy}/model", f"data.train_files={file}", *more))


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_status_2(toy: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows\x1b[31m.parquet", **(GOOD | {"input_ids": [[1.0, 1.9], [3.0, 4.0]]}))
    files = [f"model.path={toy}/model", f"data.train_files='{path}'", f"trainer.default_local_dir={tmp_path}/saved"]
    command = [sys.executable, "-m", "tree_rl.sft", *CPU, *TOKEN_ROWS, *files]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert ended.returncode == 2, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("tree SFT: "))
    assert "\\x1b[31m.parquet: row 0, column input_ids: expected a list of integers, received 1.9 at 1" in line
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "saved").exists()
