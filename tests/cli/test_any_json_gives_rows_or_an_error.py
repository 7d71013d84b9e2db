"""Whatever a file holds: rows, or an error that is a line; never another exception."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_files import write

from tree_rl.cost import ModelShape
from tree_rl.inspection.files import InputError
from tree_rl.inspection.overlap_by_group import report_groups, total_of
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_recording
from tree_rl.inspection.run_plan import plan_run
from tree_rl.inspection.text import format_report, format_run_plan
from tree_rl.inspection.verdict.grouping import regroup
from tree_rl.tree import RowError

EDGES = [2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**60, 0.5, 1.0, float("nan"), 1e308]
NUMBERS = st.one_of(st.integers(-5, 50), st.sampled_from(EDGES), st.booleans(), st.none())
KEYS = st.one_of(st.text(max_size=3), st.sampled_from(["messages", "choices", "message", "role", "content", "text"]))
ANYTHING = st.recursive(
    st.one_of(NUMBERS, st.text(st.characters(codec=None), max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)
IDS = st.one_of(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(NUMBERS, max_size=4), ANYTHING)
NAMES = st.sampled_from(
    ["input_ids", "prompt_ids", "response_ids", "prompts", "responses", "response_mask", "loss_mask", "uid", "group"]
)
RECORDS = st.one_of(
    st.lists(st.dictionaries(NAMES, IDS, max_size=5), max_size=5),
    st.lists(st.fixed_dictionaries({"input_ids": IDS, "uid": ANYTHING}), max_size=5),
    st.lists(ANYTHING, max_size=3),
)
SHAPE = ModelShape(hidden=8, layers=1, intermediate=8, heads=2, kv_heads=2, head_dim=4, vocab=16)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_and_show(path: Path, tokenizer: Path | None = None) -> list[Row] | None:
    """The rows that a file holds, reported and planned; None where it is refused."""
    try:
        recording = read_recording(path, tokenizer=tokenizer)
    except (InputError, RowError) as error:
        assert str(error)
        return None
    rows = recording.rows
    assert all(row.token_ids.dtype == np.int64 and len(row.token_ids) for row in rows)
    assert regroup(recording) is not None and str(recording.taken[0]).isprintable()
    reports = report_groups(rows)
    report = format_report(reports, total_of(reports), total_of(reports), SHAPE, at_most=9)
    assert (report + format_run_plan(plan_run(rows, 64), at_most=9)).replace("\n", "").isprintable()
    return rows


@QUICK
@given(records=RECORDS)
def test_json_rows(records: list[Any], tmp_path: Path) -> None:
    whole, by_line = (read_and_show(write(tmp_path / name, records)) for name in ("rows.json", "rows.jsonl"))
    assert (whole is None) == (by_line is None)
    if whole is not None and by_line is not None:
        # What passes is what stands there: nothing was rounded.
        assert [row.token_ids.tolist() for row in whole] == [row.token_ids.tolist() for row in by_line]
        if all("input_ids" in one and not {"prompts", "prompt_ids"} & one.keys() for one in records):
            assert [row.token_ids.tolist() for row in whole] == [record["input_ids"] for record in records]


ANSWER = {"role": "assistant", "content": "Done.", "tool_calls": None, "refusal": None}
ASKED = [{"role": role, "content": "Fix it."} for role in ("system", "user")]
MESSAGE = st.one_of(st.sampled_from([*ASKED, ANSWER]), ANYTHING)
VALUES = st.one_of(st.lists(MESSAGE, max_size=3), MESSAGE.map(lambda one: {"choices": [{"message": one}]}), ANYTHING)
COLUMNS = ["request", "messages", "response", "input", "output", "prompt", "completion", "segments", "type"]


@QUICK
@given(records=st.lists(st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=5), max_size=3))
def test_records_of_logs(records: list[Any], tmp_path: Path, chatml: Path) -> None:
    rows = read_and_show(write(tmp_path / "log.jsonl", records), chatml)
    assert rows is None or all(row.trained is not None for row in rows)


JSON_LIKE = st.text(st.sampled_from('[]{}",:\\ \n0123456789.eE+-truefalsnINy\ufeff\x00\x1b'), max_size=60)


@QUICK
@given(data=st.one_of(JSON_LIKE.map(str.encode), st.binary(max_size=60)))
def test_bytes(data: bytes, tmp_path: Path) -> None:
    for name in ("rows.json", "rows.jsonl", "rows.parquet"):
        (tmp_path / name).write_bytes(data)
        read_and_show(tmp_path / name)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_damaged_parquet(compression: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 1000, draw.integers(1, 20)).tolist() for _ in range(60)]
    table = pyarrow.table({"input_ids": ids, "loss_mask": [[1] * len(row) for row in ids], "uid": list("ab") * 30})
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, compression=compression, write_page_checksum=True)
    good, path = stream.getvalue(), tmp_path / "rows.parquet"
    path.write_bytes(good)
    assert len(read_and_show(path) or []) == 60
    refused = 0
    for _ in range(150):
        data = bytearray(good)
        # Pages of 60 rows and the footer are of about equal size.
        for at in draw.integers(4, len(data), draw.integers(1, 4)):
            data[at] = draw.integers(0, 256)
        path.write_bytes(data[: draw.integers(1, len(data))] if draw.random() < 0.2 else data)
        rows = read_and_show(path)
        refused += rows is None
        # With checksums a page that is read is the page that was written.
        assert rows is None or {tuple(row.token_ids.tolist()) for row in rows} <= set(map(tuple, ids))
    assert refused > 75
