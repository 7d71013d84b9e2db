"""Groups of attempts, small: a harness in its sandbox, rows that `tree-rl inspect` reads, a line of figures."""

import shutil
from dataclasses import replace
from pathlib import Path

import harness_rows
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="harnesses run in bubblewrap")
CASE = "mini_swe_thinks"


def test_thoughts_that_the_template_drops_make_a_row_of_every_call(
    tmp_path: Path, qwen_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(harness_rows.CASES, CASE, replace(harness_rows.CASES[CASE], attempts=2, steps=3))
    line = harness_rows.play(CASE, tmp_path, qwen_tokenizer, at_once=2)
    table = pq.read_table(tmp_path / f"{CASE}.parquet").to_pydict()
    # Three commands and the submission.
    assert table["session"] == ["0"] * 4 + ["1"] * 4 and line["calls"] == line["rows"] == 8
    lengths = [len(row) for row in table["input_ids"]]
    assert (line["tokens"], line["longest_row"]) == (sum(lengths), max(lengths))
    assert sum(map(sum, table["response_mask"])) == line["trained_tokens"]
    prefixes = {tuple(row[:end]) for row in table["input_ids"] for end in range(1, len(row) + 1)}
    assert line["unique_tokens"] == len(prefixes)
    longest = [max(rows, key=len) for rows in (table["input_ids"][:4], table["input_ids"][4:])]
    first, second = (row[: line["shared_prompt"] + 1] for row in longest)
    assert first[:-1] == second[:-1] and first != second
    assert 0 < line["por_within_sessions"] < line["por"] < 1
    assert line["bound"] == line["tokens"] / line["unique_tokens"]
