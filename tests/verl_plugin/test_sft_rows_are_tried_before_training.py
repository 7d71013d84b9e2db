"""Every SFT row is rendered once before an engine is built: one that cannot train exactly is named by its number."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sft_harness
import torch
from omegaconf import OmegaConf
from rank_processes import run_ranks
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset

from tree_rl.cost.balance.batch import number_groups
from tree_rl.inspection.files import InputError
from tree_rl.verl_plugin.sft import TreeSFTTrainer, group_rows
from tree_rl.verl_plugin.sft.dry_pass import refuse_unusable_rows
from tree_rl.verl_plugin.sft.sft_trainer import MarkedRows, collate_with_uid
from tree_rl.verl_plugin.sft.token_rows_dataset import TokenRowsDataset

QWEN = Path(__file__).parents[2] / "examples" / "qwen_chat_template.jinja"
ALTERNATES = (
    "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS_LAST = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def say(role: str, content: str | None = "12") -> dict[str, Any]:
    return {"role": role, "content": content}


GOOD = [say("user"), say("assistant")]
LONG = [say("user", "1" * 2000), say("assistant")]
ASKED_TWICE = [*GOOD, say("user"), say("assistant")]
ONE_RESULT = [say("user"), say("assistant"), say("tool"), say("assistant")]
TWO_RESULTS = [say("user"), say("assistant"), say("tool"), say("tool"), say("assistant")]
BAD: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "two tool results in a row": (QWEN.read_text(), TWO_RESULTS, r"data\.ignore_input_ids_mismatch=true"),
    "a role that the template refuses": (ALTERNATES, ONE_RESULT, "Only user and assistant roles are supported!"),
    "an empty thought in the last turn": (THINKS_LAST, ASKED_TWICE, r"model\.custom_chat_template"),
    "longer than a row may be": (ALTERNATES, LONG, r"data\.max_length \(sequence_length=\d+ is larger .*\); raise it"),
}


def write(path: Path, *rows: list[dict[str, Any]]) -> Path:
    return sft_harness.write(path, messages=list(rows))


class ReachedEngineError(Exception):
    """All rows were taken."""


@pytest.fixture(autouse=True)
def no_engine(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeSFTTrainer, "_build_engine", Mock(side_effect=ReachedEngineError))


def begin(toy: Path, template: str, *overrides: str) -> None:
    (toy / "model/chat_template.jinja").write_text(template)
    TreeSFTTrainer(sft_harness.sft_config("data.train_batch_size=1", f"model.path={toy}/model", *overrides))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_with_its_file_and_number(case: str, toy: Path, tmp_path: Path) -> None:
    template, bad, complaint = BAD[case]
    good = write(tmp_path / "good.parquet", GOOD, GOOD, GOOD)
    late = write(tmp_path / "late.parquet", GOOD, bad, GOOD, bad)
    # The row counts in its own file, of training and of validation alike.
    named = rf"late\.parquet: row 1: .*{complaint}.*1 more of \d rows: \d"
    with pytest.raises(InputError, match=rf"data\.train_files: \S*{named}"):
        begin(toy, template, f"data.train_files=[{good},{late}]")
    with pytest.raises(InputError, match=rf"data\.val_files: \S*{named}"):
        begin(toy, template, f"data.train_files={good}", f"data.val_files={late}")
    with pytest.raises(ReachedEngineError):
        begin(toy, template, f"data.train_files={late}", "data.train_max_samples=1")


def test_what_the_config_lets_pass_is_not_refused(toy: Path, tmp_path: Path) -> None:
    long = write(tmp_path / "long.parquet", [say("user"), say("assistant", "1" * 2000)])
    results = write(tmp_path / "results.parquet", TWO_RESULTS, GOOD)
    for template, path, option in (
        (ALTERNATES, long, "data.max_length=4000"),
        (ALTERNATES, long, "data.truncation=right"),
        (QWEN.read_text(), results, "data.ignore_input_ids_mismatch=true"),
        (QWEN.read_text(), write(tmp_path / "one.parquet", ONE_RESULT), "data.num_workers=1"),
    ):
        with pytest.raises(ReachedEngineError):
            begin(toy, template, f"data.train_files={path}", option)


def test_files_without_a_trained_token_are_told(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = write(tmp_path / "nothing.parquet", [say("user")], [say("user"), say("user")])
    for files, said in ((nothing, "nothing would train"), ("[]", r"data\.train_files: expected a file, received none")):
        with pytest.raises(InputError, match=said):
            begin(toy, ALTERNATES, f"data.train_files={files}")
    cut = write(tmp_path / "cut.parquet", GOOD, LONG, GOOD)
    with pytest.raises(ReachedEngineError):
        begin(toy, ALTERNATES, f"data.train_files={cut}", "data.truncation=right")
    assert "data.train_files: 1 of 3 rows have no token that counts" in capsys.readouterr().out


def test_ids_that_the_model_does_not_embed_are_named(toy: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    (other / "chat_template.jinja").write_text(ALTERNATES)
    size = len(tokenizer) - 1
    path = write(tmp_path / "new.parquet", GOOD, [say("user", "<new>"), say("assistant")])
    settings = {"custom_cls": {"path": None}, "train_files": str(path), "num_workers": 0, "pad_mode": "no_padding"}
    data = OmegaConf.create(settings)
    dataset = create_sft_dataset(data.train_files, data, AutoTokenizer.from_pretrained(other), None)
    with pytest.raises(InputError, match=rf"new\.parquet: row 1: expected ids in \[0, {size}\), received {size}"):
        refuse_unusable_rows(dataset, data, **(AS_TREES | {"vocab_size": size, "max_positions": None}))
    refuse_unusable_rows(dataset, data, **(AS_TREES | {"vocab_size": size + 1, "max_positions": None}))


OF_THE_USER = OmegaConf.create({"custom_cls": {"path": "mine.py"}, "train_files": "a.parquet", "num_workers": 0})
AS_TREES: dict[str, Any] = {"key": "train_files", "vocab_size": 10, "on_trees": True, "max_positions": 3}
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "first token trained": ({"loss_mask": [1, 1]}, "trains its first token"),
    "positions that do not count": ({"position_ids": [0, 0]}, "position_ids do not count its tokens"),
    "longer than the model's positions": (
        {"input_ids": [1] * 4, "loss_mask": [0, 1, 1, 1], "position_ids": [0, 1, 2, 3]},
        "4 tokens exceed the model's 3 positions; .* data.truncation=right",
    ),
    "short mask": ({"loss_mask": [0]}, "expected a loss_mask entry for each of its 2 tokens, received 1"),
    "no positions": ({"position_ids": None}, "KeyError: 'position_ids'"),
    "fractions": ({"input_ids": [1.0, 2.0]}, r"whole numbers, received torch.float32 \[2\]"),
    "two dimensions": ({"input_ids": [[1, 2]]}, r"one dimension .* received torch.int64 \[1, 2\]"),
}
VERLS = ("first token trained", "positions that do not count", "longer than the model's positions")


def row_of(**columns: Any) -> dict[str, torch.Tensor]:
    given = {"input_ids": [1, 2], "loss_mask": [0, 1], "position_ids": [0, 1]} | columns
    return {name: torch.tensor(values) for name, values in given.items() if values is not None}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_row_of_another_data_set_that_the_engine_would_refuse_is_named(case: str) -> None:
    columns, complaint = BAD_ROWS[case]
    rows = [row_of(), row_of(**columns)]
    with pytest.raises(InputError, match=rf"data\.train_files: row 1 of the data set of a\.parquet: .*{complaint}"):
        refuse_unusable_rows(rows, OF_THE_USER, **AS_TREES)
    if case in VERLS:
        # verl's own forward takes them.
        refuse_unusable_rows(rows, OF_THE_USER, **(AS_TREES | {"on_trees": False}))


def test_rows_longer_than_the_models_positions_are_named_where_trees_run_them(toy: Path, tmp_path: Path) -> None:
    # The model of the recipes has 2048 positions.
    long = write(tmp_path / "long.parquet", GOOD, [say("user", "1" * 2100), say("assistant")])
    messages = ALTERNATES, f"data.train_files={long}", "data.max_length=4000"
    with pytest.raises(InputError, match=r"long\.parquet: row 1: \d+ tokens exceed the model's 2048 positions"):
        begin(toy, *messages)
    ids = sft_harness.write(tmp_path / "ids.parquet", input_ids=[[5] * 2100], loss_mask=[[0] + [1] * 2099])
    with pytest.raises(InputError, match=r"ids\.parquet: row 0: 2100 tokens exceed the model's 2048 positions"):
        begin(toy, ALTERNATES, f"data.train_files={ids}", *sft_harness.TOKEN_ROWS, messages[-1])
    for stock in ("+model.model_type=language_model", "engine.tree.mode=flat"):
        with pytest.raises(ReachedEngineError):
            begin(toy, *messages, stock)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for message in messages %}", "{{ a.b.c }}"])
def test_a_template_of_which_verl_builds_no_data_set_is_told(template: str, toy: Path, tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", GOOD)
    with pytest.raises(InputError, match=r"chat template .* that fails: \w+Error: .*model\.custom_chat_template"):
        begin(toy, template, f"data.train_files={good}")


def test_a_batch_smaller_than_the_ranks_is_told(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write(tmp_path / "good.parquet", GOOD, GOOD)
    ranks = SimpleNamespace(get_data_parallel_size=lambda: 2)
    monkeypatch.setattr(TreeSFTTrainer, "_build_engine", lambda self: setattr(self, "engine", ranks))
    with pytest.raises(InputError, match=r"data\.train_batch_size=1: expected at least one for each of 2 ranks"):
        begin(toy, ALTERNATES, f"data.train_files={good}")


class Countdown(torch.utils.data.Dataset):
    """A data set of the user: row 700 cannot be read."""

    def __len__(self) -> int:
        return 900

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return row_of(input_ids=[1, 1 // (700 - index)])


def complaint_of(rank: int) -> str:
    with pytest.raises(InputError) as refused:
        refuse_unusable_rows(Countdown(), OF_THE_USER, **AS_TREES)
    return str(refused.value)


def test_ranks_share_the_rows_and_say_the_same() -> None:
    said = run_ranks(complaint_of, 2)
    assert said[0] == said[1]
    # Ids of rows before 700 are at least 0; behind it 1 // negative is -1.
    assert said[0].startswith("data.train_files: row 700 of the data set of a.parquet: ")
    assert "ZeroDivisionError" in said[0] and "199 more of 900 rows: 701, 702" in said[0]


def test_the_group_key_decides_which_rows_are_a_tree() -> None:
    rows = [{"input_ids": torch.tensor([1, 2, *range(at, at + 8)])} for at in (10, 30, 10, 70)]
    conversation_of_row = np.array([5, 5, 7, 7])
    grouped = MarkedRows(rows, group_of_row=conversation_of_row)

    def collate(bare: list[dict[str, Any]]) -> dict[str, Any]:
        assert all(row.keys() == {"input_ids"} for row in bare)
        return {}

    for read, expected in ((grouped, conversation_of_row), (rows, np.array([0, 1, 0, 2]))):
        named = collate_with_uid(collate, [read[number] for number in range(4)])["uid"].tolist()
        assert number_groups(named).tolist() == number_groups([str(one) for one in expected]).tolist()


IDS: dict[str, Any] = {"input_ids": [[1, 2], [3, 4]], "loss_mask": [[0, 1], [0, 1]]}
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
    good = sft_harness.write(tmp_path / "good.parquet", **IDS)
    bad = sft_harness.write(tmp_path / "bad.parquet", **(IDS | columns))
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
        (sft_harness.write(tmp_path / "a.parquet", input_ids=[[1]], mask=[[0]]), r"missing \['loss_mask'\]; it has"),
    ):
        with pytest.raises(InputError, match=complaint):
            TokenRowsDataset(str(path), None, {})


def test_large_slices_of_any_integer_type_are_read_exactly(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    ids = [draw.integers(0, 100, draw.integers(1, 9)).tolist() for _ in range(200)]
    masks = [[0, *[1] * (len(row) - 1)] for row in ids]
    for kind in (pa.int8(), pa.int32(), pa.uint16(), pa.uint64()):
        for of in (pa.list_, pa.large_list):
            columns = {"input_ids": pa.array(ids, of(kind)), "loss_mask": pa.array(masks, of(pa.int64()))}
            pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=7)
            read = TokenRowsDataset(str(tmp_path / "rows.parquet"), None, {}, max_samples=150)
            for name, expected in (("input_ids", ids), ("loss_mask", masks)):
                assert [read[row][name].tolist() for row in range(len(read))] == expected[:150]
    booleans = sft_harness.write(tmp_path / "b.parquet", input_ids=[[1, 2]], loss_mask=[[False, True]])
    assert TokenRowsDataset(str(booleans), None, {})[0]["loss_mask"].tolist() == [0, 1]


def test_a_row_without_a_conversation_is_refused(tmp_path: Path) -> None:
    path = sft_harness.write(tmp_path / "rows.parquet", **IDS, episode=["a", None])
    with pytest.raises(InputError, match=r"data\.group_key='episode': row 1"):
        group_rows(TokenRowsDataset(str(path), None, {}), "episode")
    # As verl's data set reads a file.
    numbers = sft_harness.write(tmp_path / "numbers.parquet", episode=[1.0, float("nan")])
    of_verl = SimpleNamespace(dataframe=pd.read_parquet(numbers, dtype_backend="pyarrow"))
    with pytest.raises(InputError, match=r"data\.group_key='episode': row 1"):
        group_rows(of_verl, "episode")


def test_mistakes_in_files_are_told_before_an_engine_is_built(toy: Path, tmp_path: Path) -> None:
    good = sft_harness.write(tmp_path / "good.parquet", **IDS)
    outside = sft_harness.write(tmp_path / "outside.parquet", **(IDS | {"input_ids": [[1, 2], [3, 10**6]]}))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-10])
    two = ["data.train_batch_size=2", *sft_harness.TOKEN_ROWS]
    for file, more, complaint in (
        (outside, two, r"outside.*row 1, column input_ids: .*received 1000000 at 1"),
        (good, [f"data.val_files={outside}", *two], r"outside.*row 1, column input_ids"),
        (good, ["data.train_batch_size=8", *sft_harness.TOKEN_ROWS], "at least the 8 rows of a batch"),
        (good, [], r"data\.train_files: \S*good.*expected a column messages"),
        (cut, [], "expected a whole parquet file"),
        (write(tmp_path / "no_role.parquet", [{"content": "hi"}]), [], "row 0, column messages"),
        (write(tmp_path / "nothing.parquet", GOOD, []), [], r"nothing\.parquet: row 1, column messages: .* \[\]"),
    ):
        with pytest.raises(InputError, match=complaint):
            begin(toy, ALTERNATES, f"data.train_files={file}", *more)


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_status_2(toy: Path, tmp_path: Path) -> None:
    path = sft_harness.write(tmp_path / "rows\x1b[31m.parquet", **(IDS | {"input_ids": [[1.0, 1.9], [3.0, 4.0]]}))
    files = [f"model.path={toy}/model", f"data.train_files='{path}'", f"trainer.default_local_dir={tmp_path}/saved"]
    command = [sys.executable, "-m", "tree_rl.sft", *sft_harness.CPU, *sft_harness.TOKEN_ROWS, *files]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert ended.returncode == 2, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("tree SFT: "))
    assert "\\x1b[31m.parquet: row 0, column input_ids: expected a list of integers, received 1.9 at 1" in line
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "saved").exists()
