"""SFT decodes messages and tools as `tree-rl inspect` does, before verl's dataset renders them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from tree_rl.inspection.row_file import read_row_file
from tree_rl.verl_plugin.sft.checked_data import check_rows

CALLS = [{"name": "look", "arguments": {"path": "a.py"}}, {"name": "run", "arguments": {"file": "b.py"}}]
CHATS = [
    [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "Done."},
    ]
    for call in CALLS
]
RENAMED = {"user": "human", "assistant": "GPT", "tool": "observation"}
TEXT = json.dumps


@pytest.fixture(scope="module")
def tokenizer(toy: Path) -> Any:
    made = AutoTokenizer.from_pretrained(toy / "model")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


def rows(path: Path, tokenizer: Any, cells: list[Any], **more: list[Any]) -> list[tuple[list[int], list[int]]]:
    columns = pyarrow.Table.from_pylist([{"messages": cell} for cell in cells])
    for name, values in more.items():
        columns = columns.append_column(name, pyarrow.array(values))
    pyarrow.parquet.write_table(columns, path)
    given = {"messages_key": "messages", "train_batch_size": 1, "pad_mode": "no_padding", "custom_cls": {"path": None}}
    data = OmegaConf.create(given)
    dataset = MultiTurnSFTDataset(str(path), tokenizer, data)
    check_rows(dataset, data, key="train_files")
    return [(dataset[n]["input_ids"].tolist(), dataset[n]["loss_mask"].tolist()) for n in range(len(dataset))]


@pytest.mark.parametrize(
    "spell",
    [
        lambda chat: TEXT(chat),
        lambda chat: [TEXT(one) for one in chat],
        lambda chat: chat,
        lambda chat: [{**one, "role": RENAMED[one["role"]]} for one in chat],
        lambda chat: [{**one, "tool_calls": TEXT(one.get("tool_calls", []))} for one in chat],
    ],
    ids=["text", "list of texts", "null padding", "roles", "calls as text"],
)
def test_spellings_train_what_the_plain_form_trains(spell: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = rows(tmp_path / "f.parquet", tokenizer, [spell(chat) for chat in CHATS])
    # One row a file: parquet adds no nulls.
    expected = [rows(tmp_path / f"{n}.parquet", tokenizer, [chat])[0] for n, chat in enumerate(CHATS)]
    assert found == expected and all(any(mask) for _, mask in found)
    assert "file" not in tokenizer.decode(found[0][0])


@pytest.mark.parametrize(
    "system", [["Be brief.", None], [[{"type": "text", "text": "Be brief."}], None]], ids=["text", "parts"]
)
def test_a_column_of_system_texts_is_read_as_inspect_reads_it(system: Any, tmp_path: Path, tokenizer: Any) -> None:
    path, folder = tmp_path / "f.parquet", tmp_path / "tokenizer"
    found = rows(path, tokenizer, [chat[::3] for chat in CHATS], system=system)
    tokenizer.save_pretrained(folder)
    inspected = read_row_file(path, tokenizer=folder)
    assert found == [(row.token_ids.tolist(), row.trained.astype(int).tolist()) for row in inspected]
    assert ["Be brief." in tokenizer.decode(ids) for ids, _ in found] == [True, False]
