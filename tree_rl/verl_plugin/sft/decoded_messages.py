"""Normalises the conversations of verl's SFT dataset."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from tree_rl.inspection.chat_rows import SYSTEM_TEXT
from tree_rl.inspection.files import RowFileError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.messages.conversation import read_chat
from tree_rl.inspection.messages.json_cells import without_padding
from tree_rl.inspection.messages.roles import ASSISTANT
from tree_rl.inspection.messages.template_form import TemplateForm


def decode_messages(dataset: Any, data: DictConfig, *, key: str, place: Callable[[int], str]) -> None:
    """Normalise messages and tools of verl's dataset in place: JSON text, other names of roles, parts, null padding.

    The column `system`, which verl does not read, is the system message of conversations without one.
    `key` names the files in `data`, and `place` describes a row. Raises a RowFileError, which names a row that cannot
    be read, or if no row has a turn of the assistant.
    """
    form, chats = form_of(dataset.tokenizer), []
    absent = [None] * len(dataset.messages)
    columns = dataset.messages, dataset.tools or absent, _system_texts(dataset.dataframe) or absent
    for row, cells in enumerate(zip(*columns, strict=True)):
        cell, tools, system = map(without_padding, cells)
        where = f"data.{key}: {place(row)}, column {quoted(data.messages_key)}"
        chat = read_chat(cell, tools, form, where, system=system)
        if chat is None:
            raise RowFileError(f"{where}: expected a list of messages with a role each, received {quoted(cell)}")
        chats.append(chat)
    if chats and not any(message["role"] == ASSISTANT for chat in chats for message in chat.messages):
        raise RowFileError(f"data.{key}: expected a message of the assistant, received none; nothing would train")
    dataset.messages = [chat.messages for chat in chats]
    dataset.tools = [chat.tools for chat in chats] if any(chat.tools for chat in chats) else None
    column = pd.Series(dataset.messages, index=dataset.dataframe.index, dtype=object)
    dataset.dataframe = dataset.dataframe.assign(**{dataset.messages_key: column})


def _system_texts(table: pd.DataFrame) -> list[Any]:
    """Texts or parts in the column `system`, None for missing ones; empty if there is no such column."""
    if SYSTEM_TEXT not in table:
        return []
    values = table[SYSTEM_TEXT].to_numpy(dtype=object, na_value=None)
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def form_of(tokenizer: Any) -> TemplateForm:
    """The form of messages that a tokenizer's chat template expects."""
    template = tokenizer.chat_template
    return TemplateForm.of(
        template if isinstance(template, str) else "",
        lambda messages: str(tokenizer.apply_chat_template(list(messages), tokenize=False)),
    )
