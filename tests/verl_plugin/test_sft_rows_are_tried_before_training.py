"""Every SFT row is rendered once before an engine is built: one that cannot train is named by file and number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sft_harness
import torch
from omegaconf import OmegaConf
from rank_processes import run_ranks
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset

from tree_rl.cost.balance.batch import number_groups
from tree_rl.inspection.files import InputError
from tree_rl.verl_plugin.sft import TreeSFTTrainer
from tree_rl.verl_plugin.sft.dry_pass import refuse_unusable_rows
from tree_rl.verl_plugin.sft.sft_trainer import MarkedRows, collate_with_uid

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
    def reached(self: TreeSFTTrainer) -> None:
        raise ReachedEngineError

    monkeypatch.setattr(TreeSFTTrainer, "_build_engine", reached)


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


def test_rows_without_a_trained_token_are_told(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = write(tmp_path / "nothing.parquet", [say("user")], [say("user"), say("user")])
    with pytest.raises(InputError, match="nothing would train"):
        begin(toy, ALTERNATES, f"data.train_files={nothing}")
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
    settings = {"custom_cls": {"path": None}, "train_files": str(path), "num_workers": 0, "max_length": 99}
    data = OmegaConf.create(settings)
    dataset = create_sft_dataset(data.train_files, data, AutoTokenizer.from_pretrained(other), None)
    with pytest.raises(InputError, match=rf"new\.parquet: row 1: expected ids in \[0, {size}\), received {size}"):
        refuse_unusable_rows(dataset, data, key="train_files", vocab_size=size)
    refuse_unusable_rows(dataset, data, key="train_files", vocab_size=size + 1)


class Countdown(torch.utils.data.Dataset):
    """A data set of the user: row 700 cannot be read."""

    def __len__(self) -> int:
        return 900

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([1, 1 // (700 - index)]), "loss_mask": torch.tensor([0, 1])}


def complaint_of(rank: int) -> str:
    data = OmegaConf.create({"custom_cls": {"path": "mine.py"}, "train_files": "a.parquet", "num_workers": 0})
    with pytest.raises(InputError) as refused:
        refuse_unusable_rows(Countdown(), data, key="train_files", vocab_size=10)
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
